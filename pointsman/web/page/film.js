// Reads a film: its frames, and the state at any of them. Like pointsman/web/film.py, which tests compare it with.
//
//     const film = await Film.read(arrayBuffer)
//     film.frames                 one for each step that was decided alone, and one for each run of steps
//     film.stateAt(17)            requests, queue and blocks after the decision of frame 17
//     film.stateAt(17, 890)       after step 890, one of the run of steps in frame 17
//     film.eventsOf(17)           the events that led to it, in order
//
// Nothing is decided here: a state is the key frame of its chunk with the events since then applied.

"use strict";

const MAGIC = "pointsman film\n";
const FORMAT_VERSION = 3;
const MAX_CHUNK = 2 ** 25;
const MAX_UNPACKED = 16; // chunks whose unpacked blocks and applied events are kept

class FilmError extends Error {}

// The columns of each kind of chunk, in order; a + marks columns of differences. As COLUMNS in film_format.py.
const COLUMNS = {
  R: "id tenant +arrival prompt_tokens max_tokens priority",
  E: `key_time +key_running +key_waiting +key_parked key_status key_reason key_computed key_cached key_generated
    key_prompt key_preemptions key_admissions key_flight key_flight_request key_flight_tokens key_flight_flags op +time
    +request
    refused_why parked_status deferred_reason deferred_missing deferred_holder admitted_resumed admitted_cached
    admitted_external preempted_cause preempted_lost preempted_cached preempted_recovery preempted_by
    preempted_missing preempted_chooser finished_reason finished_generated finished_detail +step_id step_blocked +step_free step_evicted
    +step_blocker step_skipped +skipped_request step_exceptions exception_row exception_tokens exception_flags
    update_exceptions update_row update_count
    steps_count steps_ends +steps_micros failed_steps failed_rows failed_computed load_tokens load_failed priority
    extended_prompt extended_generated pause_mode limit`,
  B: "key_count +key_block +key_held key_held_count key_cached +frame op +request count +block value",
};
for (const [kind, names] of Object.entries(COLUMNS)) {
  COLUMNS[kind] = names.split(/\s+/).map((name) => ({ name: name.replace("+", ""), differences: name[0] === "+" }));
}

// The fields of each event besides its time and, for most events, its request.
const OF_STEPS = ["step_id", "step_blocked", "step_free", "step_evicted", "step_blocker", "step_skipped"];
const FIELDS = {
  added: [], refused: ["refused_why"], queued: [], parked: ["parked_status"],
  deferred: ["deferred_reason", "deferred_missing", "deferred_holder"],
  admitted: ["admitted_resumed", "admitted_cached", "admitted_external"],
  preempted: ["preempted_cause", "preempted_lost", "preempted_cached", "preempted_recovery", "preempted_by",
    "preempted_missing", "preempted_chooser"],
  rolled_back: [], finished: ["finished_reason", "finished_generated", "finished_detail"],
  step: [...OF_STEPS, "step_exceptions"], update: ["update_exceptions"],
  steps: [...OF_STEPS, "steps_count", "steps_ends"], failed: ["failed_steps", "failed_rows"],
  load_started: ["load_tokens"], load_finished: ["load_tokens", "load_failed"], priority: ["priority"],
  extended: ["extended_prompt", "extended_generated"], paused: ["pause_mode"], limited: ["limit"],
};
const OF_NO_REQUEST = new Set(["step", "update", "steps", "failed", "paused", "limited"]);

// ---------------------------------------------------------------------------------------------------------- bytes

// Numbers of seven bits a byte, lowest first.
class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  number() {
    let value = 0;
    let scale = 1;
    for (;;) {
      if (this.at >= this.bytes.length) throw new FilmError("a chunk ends within a column; the film is broken");
      const byte = this.bytes[this.at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
      scale *= 128;
      if (scale > 2 ** 63) throw new FilmError("a number has more than ten bytes; the film is broken");
    }
  }

  column(differences) {
    const count = this.number();
    if (count > this.bytes.length - this.at) throw new FilmError("a column is longer than its chunk; the film is broken");
    const values = new Array(count);
    let last = 0;
    for (let index = 0; index < count; index++) {
      const folded = this.bytes[this.at] < 128 ? this.bytes[this.at++] : this.number();
      const value = folded % 2 ? -(folded + 1) / 2 : folded / 2;
      last = differences ? last + value : value;
      values[index] = last;
    }
    return values;
  }

  strings() {
    if (this.at === this.bytes.length) return [];
    const count = this.number();
    const text = new TextDecoder().decode(this.bytes.subarray(this.at, this.at + count));
    try {
      return JSON.parse(text);
    } catch {
      throw new FilmError("the strings of a chunk are not JSON; the film is broken");
    }
  }
}

async function inflate(bytes, size) {
  const source = new ReadableStream({
    start(controller) {
      controller.enqueue(bytes);
      controller.close();
    },
  });
  const stream = source.pipeThrough(new DecompressionStream("deflate"));
  const out = new Uint8Array(size);
  let at = 0;
  try {
    for await (const part of stream) {
      if (at + part.length > size) throw new FilmError("a chunk is longer than it says; the film is broken");
      out.set(part, at);
      at += part.length;
    }
  } catch (error) {
    if (error instanceof FilmError) throw error;
    throw new FilmError(`a chunk cannot be unpacked (${error.message}); the film is broken`);
  }
  if (at !== size) throw new FilmError("a chunk is shorter than it says; the film is broken");
  return out;
}

function unpack(kind, bytes) {
  const reader = new Reader(bytes);
  const columns = {};
  for (const { name, differences } of COLUMNS[kind]) columns[name] = reader.column(differences);
  return { columns, strings: reader.strings() };
}

// The first index whose value satisfies `holds`, if all later values do too; the length if there is none.
function firstOf(values, holds) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(values[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The last index whose value satisfies `holds`, if all earlier values do too; 0 if there is none.
function lastOf(values, holds) {
  return Math.max(0, firstOf(values, (value) => !holds(value)) - 1);
}

// The time passed at the beginning of each step, given the steps' lengths, and at the end of the last one.
function passed(lengths) {
  const found = new Float64Array(lengths.length + 1);
  lengths.forEach((length, index) => (found[index + 1] = found[index] + length));
  return found;
}

// The columns of a chunk that are still needed once its events are decoded.
function keyFrameOf(columns) {
  return Object.fromEntries(Object.entries(columns).filter(([name]) => name.startsWith("key_")));
}

// ---------------------------------------------------------------------------------------------------------- a film

class Film {
  static async read(buffer) {
    const film = new Film();
    await film._read(new Uint8Array(buffer));
    return film;
  }

  async _read(bytes) {
    const head = new TextDecoder("latin1").decode(bytes.subarray(0, MAGIC.length));
    if (head !== MAGIC) throw new FilmError("it is not a film (pointsman film makes one from a recording)");
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    let at = MAGIC.length;
    try {
      const size = view.getUint32(at, true);
      this.header = JSON.parse(new TextDecoder().decode(bytes.subarray(at + 4, at + 4 + size)));
      at += 4 + size;
    } catch {
      throw new FilmError("the film's header is broken; make it again from its recording");
    }
    if (this.header.format_version !== FORMAT_VERSION) {
      throw new FilmError(
        `the film has format version ${this.header.format_version}, and this page reads ${FORMAT_VERSION}; make the ` +
          "page again with the version of Pointsman that made the film"
      );
    }
    this.requests = [];
    this.chunks = [];
    this.unpacked = []; // most recently shown chunks, the newest last
    this.isComplete = false;
    let added = null;
    while (at + 9 <= bytes.length) {
      const kind = String.fromCharCode(bytes[at]);
      const length = view.getUint32(at + 1, true);
      const size = view.getUint32(at + 5, true);
      if (size > MAX_CHUNK || !"REBZ".includes(kind)) throw new FilmError("a chunk does not belong in a film; it is broken");
      if (at + 9 + length > bytes.length) break;
      const packed = bytes.subarray(at + 9, at + 9 + length);
      at += 9 + length;
      if (kind === "Z") this.isComplete = true;
      else if (kind === "R") added = unpack("R", await inflate(packed, size)).columns;
      else if (kind === "E") {
        if (added === null) throw new FilmError("events come before their requests; the film is broken");
        const { columns, strings } = unpack("E", await inflate(packed, size));
        this.chunks.push({ events: columns, strings, packedBlocks: null, blocks: null, walk: null });
        this._addRequests(added, strings);
        added = null;
      } else if (this.chunks.length) {
        this.chunks[this.chunks.length - 1].packedBlocks = { packed, size };
      }
    }
    if (!this.chunks.length) throw new FilmError("the film has no events; it was cut off at once");
    const isCut = !this.isComplete && this.chunks.length > 1 && this.chunks[0].packedBlocks !== null;
    if (isCut && this.chunks.at(-1).packedBlocks === null) this.chunks.pop(); // the film ends between its events and its blocks
    this.hasBlocks = this.chunks.every((chunk) => chunk.packedBlocks !== null);
    this._index();
  }

  // Blocks are unpacked when they are first shown.
  async loadBlocks(frame) {
    const chunk = this.chunks[this.frames[frame].chunk];
    if (chunk.blocks === null && this.hasBlocks) {
      const { packed, size } = chunk.packedBlocks;
      chunk.blocks = unpack("B", await inflate(packed, size)).columns;
    }
    this.unpacked = [...this.unpacked.filter((one) => one !== chunk), chunk];
    for (const old of this.unpacked.splice(0, this.unpacked.length - MAX_UNPACKED)) old.blocks = old.walk = null;
  }

  _addRequests(columns, strings) {
    for (let index = 0; index < columns.id.length; index++) {
      const tenant = columns.tenant[index];
      this.requests.push({
        id: String(strings[columns.id[index]]),
        tenant: tenant ? String(strings[tenant - 1]) : null,
        arrival: columns.arrival[index] / 1e6,
        promptTokens: columns.prompt_tokens[index],
        maxTokens: columns.max_tokens[index],
        priority: columns.priority[index],
      });
    }
  }

  // Decodes every event once, and lists the frames.
  _index() {
    const ops = this.header.names.ops;
    this.frames = []; // before: number of steps decided before it
    this.numSteps = 0;
    for (const [index, chunk] of this.chunks.entries()) {
      const at = {};
      const next = (name) => {
        const column = chunk.events[name];
        const place = at[name] ?? 0;
        if (place >= column.length) throw new FilmError(`column ${name} is too short; the film is broken`);
        at[name] = place + 1;
        return column[place];
      };
      const several = (name, count) => {
        const place = at[name] ?? 0;
        if (place + count > chunk.events[name].length) throw new FilmError(`column ${name} is too short; the film is broken`);
        at[name] = place + count;
        return chunk.events[name].slice(place, place + count);
      };
      chunk.list = chunk.events.op.map((number, place) => {
        const op = ops[number];
        if (!(op in FIELDS)) throw new FilmError("an event has an unknown kind; the film is broken");
        const event = { op, time: chunk.events.time[place] / 1e6, request: OF_NO_REQUEST.has(op) ? null : next("request") };
        if (event.request !== null && !(event.request in this.requests)) {
          throw new FilmError("an event names a request that is not in the film; it is broken");
        }
        for (const name of FIELDS[op]) event[name.replace(/^[a-z]+_/, "")] = next(name);
        if (op === "step" || op === "steps") {
          event.skipped = event.skipped ? several("skipped_request", event.skipped - 1) : null;
        }
        if (op === "step") {
          event.rows = [];
          for (let count = event.exceptions; count > 0; count--) {
            event.rows.push([next("exception_row"), next("exception_tokens"), next("exception_flags")]);
          }
        } else if (op === "update") {
          const rows = several("update_row", event.exceptions);
          const counts = several("update_count", event.exceptions);
          event.rows = rows.map((row, index) => [row, counts[index]]);
        } else if (op === "failed") {
          event.computed = several("failed_computed", event.rows);
        } else if (op === "steps") {
          event.passed = passed(several("steps_micros", event.count));
        } else if (op === "refused") {
          event.why = String(chunk.strings[event.why]);
        } else if (op === "finished") {
          event.detail = event.detail ? String(chunk.strings[event.detail - 1]) : "";
        } else if (op === "preempted") {
          event.chooser = event.chooser ? String(chunk.strings[event.chooser - 1]) : "";
          if (event.by && !(event.by - 1 in this.requests)) {
            throw new FilmError("an event names a request that is not in the film; it is broken");
          }
        }
        if (op === "step" || op === "steps") {
          const numSteps = op === "step" ? 1 : event.count;
          this.frames.push({ chunk: index, event: place, step: event.id, numSteps, before: this.numSteps, time: event.time });
          this.numSteps += numSteps;
        }
        return event;
      });
      chunk.events = keyFrameOf(chunk.events);
    }
    if (!this.frames.length) throw new FilmError("the film has no step");
    const last = this.chunks[this.chunks.length - 1];
    const event = last.list.at(-1);
    this.end = event === undefined ? last.events.key_time[0] / 1e6 : event.time;
    if (event?.op === "steps") this.end += event.passed.at(-1) / 1e6;
  }

  // The events after the last step.
  eventsAfter() {
    const { chunk, event } = this.frames.at(-1);
    return this.chunks.slice(chunk).flatMap(({ list }, index) => (index ? list : list.slice(event + 1)));
  }

  // The events that led to a frame, its own step last.
  eventsOf(frame) {
    const { chunk, event } = this.frames[frame];
    const before = frame > 0 ? this.frames[frame - 1] : null;
    if (before === null || before.chunk === chunk) {
      return this.chunks[chunk].list.slice(before === null ? 0 : before.event + 1, event + 1);
    }
    return [...this.chunks[before.chunk].list.slice(before.event + 1), ...this.chunks[chunk].list.slice(0, event + 1)];
  }

  // The state at the beginning of the film, or of a later chunk.
  beginning(chunk = 0) {
    return new Walk(this, { ...this.chunks[chunk], blocks: null }).state;
  }

  // The time at which the time line begins.
  get begin() {
    return 0;
  }

  // The last frame decided up to a time.
  frameAt(time) {
    return lastOf(this.frames, (frame) => frame.time <= time);
  }

  frameOfStep(step) {
    if (!Number.isInteger(step)) return null;
    const found = lastOf(this.frames, (frame) => frame.step <= step);
    const { step: first, numSteps } = this.frames[found];
    return first <= step && step < first + numSteps ? found : null;
  }

  // The index of a step among all steps, from 0, and the reverse: indices have no gaps, ids may.
  placeOf(frame, step) {
    return this.frames[frame].before + step - this.frames[frame].step;
  }

  stepAt(place) {
    const frame = lastOf(this.frames, (one) => one.before <= place);
    return { frame, step: this.frames[frame].step + place - this.frames[frame].before };
  }

  // The decision time of a step of a frame.
  timeOf(frame, step) {
    const { step: first, time } = this.frames[frame];
    const { passed } = this.eventOf(frame);
    return passed === undefined ? time : time + passed[step - first] / 1e6;
  }

  // The index of the last step decided up to a time.
  placeAt(time) {
    const frame = this.frameAt(time);
    const { before, numSteps, time: begin } = this.frames[frame];
    const { passed } = this.eventOf(frame);
    return passed === undefined ? before : before + Math.min(numSteps - 1, lastOf(passed, (micros) => begin + micros / 1e6 <= time));
  }

  // The step, or the run of steps, of a frame.
  eventOf(frame) {
    return this.chunks[this.frames[frame].chunk].list[this.frames[frame].event];
  }

  // The state after the decision of a step of a frame; without a step, after the end of all of them. The caller may
  // only read it, and only until the next call. Call `loadBlocks` first if blocks are needed.
  stateAt(frame, step = null) {
    const { chunk, event, step: first } = this.frames[frame];
    const of = this.chunks[chunk];
    const count = step === null || of.list[event].op === "step" ? 0 : step - first + 1; // 0: all
    const end = count ? event : event + 1;
    let walk = of.walk;
    const isPast = walk === null || walk.next > end || (walk.next === end && walk.numDone > count) || walk.numEnds;
    if (isPast || walk.hasBlocks !== (of.blocks !== null)) walk = of.walk = new Walk(this, of);
    while (walk.next < end || walk.numEnds) walk.apply(of.list[walk.next++]);
    if (count) walk.advance(of.list[event], count);
    walk.state.batch ??= plainRows(walk.plain);
    return walk.state;
  }
}

// ---------------------------------------------------------------------------------------------------------- a state

// Rows that compute and sample one token, as most rows do; made only where they are needed.
function plainRows(numbers) {
  return numbers.map((number) => ({ number, tokens: 1, samples: true, drafts: 0, admission: 0 }));
}

class Walk {
  constructor(film, chunk) {
    this.film = film;
    this.names = film.header.names;
    this.next = 0;
    this.numEnds = 0;
    this.numFrames = 0;
    this.numDone = 0; // number of applied steps of the next event, if that is several steps at once
    this.numbers = null; // of the running requests, while these stay the same
    this.plain = []; // requests of the newest step, if all its rows are plain
    this.hasBlocks = chunk.blocks !== null;
    this.blocks = null;
    this._keyFrame(chunk.events);
    if (this.hasBlocks) this._openBlocks(chunk.blocks);
  }

  _keyFrame(columns) {
    const running = columns.key_running;
    const waiting = columns.key_waiting;
    const parked = columns.key_parked;
    const requests = new Map();
    [...running, ...waiting, ...parked].forEach((number, index) => {
      const numPreemptions = columns.key_preemptions[index];
      requests.set(number, {
        number, status: "waiting", prompt: columns.key_prompt[index],
        generated: columns.key_generated[index], computed: 0, cached: columns.key_cached[index], numPreemptions,
        reason: null, missing: 0, holder: null, admission: columns.key_admissions[index], table: [],
      });
    });
    running.forEach((number, index) => {
      Object.assign(requests.get(number), { status: "running", computed: columns.key_computed[index] });
    });
    [...waiting, ...parked].forEach((number, index) => {
      const status = this.names.statuses[columns.key_status[index]];
      requests.get(number).status = status;
    });
    waiting.forEach((number, index) => {
      const reason = columns.key_reason[index];
      requests.get(number).reason = reason ? this.names.reasons[reason - 1] : null;
    });
    const inFlight = [];
    let at = 0;
    for (const count of columns.key_flight) {
      const rows = [];
      for (const end = at + count; at < end; at++) {
        const flags = columns.key_flight_flags[at];
        const number = columns.key_flight_request[at] - 1;
        rows.push({
          number, tokens: columns.key_flight_tokens[at], samples: (flags & 1) === 1, drafts: flags >> 2,
          admission: flags & 2 ? requests.get(number)?.admission : -1,
        });
      }
      inFlight.push({ numbers: null, rows });
    }
    this.state = {
      requests, running: [...running], waiting: [...waiting], parked: [...parked], time: columns.key_time[0] / 1e6,
      batch: [], blocker: null, skipped: [], inFlight, numFree: null, blocked: null, held: new Map(), references: null,
      isCached: null,
    };
  }

  apply(event) {
    const state = this.state;
    state.time = event.time;
    if (event.request === null) {
      this[`_${event.op}`]?.(event);
      return;
    }
    this._ofRequest(event);
    if (this.numEnds) {
      this.numEnds--;
      if (!this.numEnds) this._blocksOf(this.numFrames - 1, false);
    }
  }

  _ofRequest(event) {
    const state = this.state;
    let one = state.requests.get(event.request);
    if (one === undefined) {
      if (event.op === "refused") return;
      one = {
        number: event.request, status: "waiting", prompt: this.film.requests[event.request].promptTokens, generated: 0,
        computed: 0, cached: 0, numPreemptions: 0, reason: null, missing: 0, holder: null, admission: 0, table: [],
      };
      state.requests.set(event.request, one);
    }
    const names = this.names;
    switch (event.op) {
      case "rolled_back":
        one.admission--;
      // falls through
      case "queued":
        this._move(one, state.waiting, one.admission ? "preempted" : "waiting");
        break;
      case "parked":
        this._move(one, state.parked, names.statuses[event.status]);
        break;
      case "deferred":
        one.reason = names.reasons[event.reason];
        one.missing = event.missing;
        one.holder = event.holder ? event.holder - 1 : null;
        break;
      case "admitted":
        this._move(one, state.running, "running");
        one.computed = one.cached = event.cached;
        one.admission++;
        break;
      case "preempted":
        one.numPreemptions++;
        this._move(one, state.waiting, "preempted");
        break;
      case "finished":
        this._move(one, null, `finished_${names.finish_reasons[event.reason]}`);
        state.requests.delete(event.request);
        break;
      case "extended":
        one.prompt = event.prompt;
        one.generated = event.generated;
        break;
    }
  }

  _move(one, place, status) {
    const state = this.state;
    this.numbers = null;
    for (const other of [state.running, state.waiting, state.parked]) {
      const index = other.indexOf(one.number);
      if (index >= 0) other.splice(index, 1);
    }
    if (one.status === "running") {
      one.computed = one.cached = 0;
      if (this.blocks !== null) this._drop(one);
    }
    Object.assign(one, { status, reason: null, missing: 0, holder: null });
    if (place !== null) place.push(one.number);
  }

  _queue(event) {
    this.state.blocker = event.blocker ? event.blocker - 1 : null;
    if (event.skipped !== null) this.state.skipped = event.skipped;
    this.state.numFree = event.free;
    this.state.blocked = event.blocked ? this.names.reasons[event.blocked - 1] : null;
  }

  _step(event) {
    const state = this.state;
    this.numbers ??= [...state.running];
    if (event.rows.length) {
      const rows = plainRows(this.numbers);
      let place = 0;
      for (const [ahead, tokens, flags] of event.rows) {
        place += ahead;
        if (!(place in rows)) throw new FilmError("a step names a row that does not run; the film is broken");
        const { admission } = state.requests.get(rows[place].number);
        Object.assign(rows[place], { tokens, samples: (flags & 1) === 1, drafts: flags >> 1, admission });
      }
      state.batch = rows.filter((row) => row.tokens);
      for (const row of state.batch) state.requests.get(row.number).computed += row.tokens;
      state.inFlight.push({ numbers: null, rows: state.batch });
    } else {
      state.batch = null;
      this.plain = this.numbers;
      for (const number of this.numbers) state.requests.get(number).computed++;
      state.inFlight.push({ numbers: this.numbers, rows: null });
    }
    this._queue(event);
    this._blocksOf(this.numFrames++, false);
  }

  _update(event) {
    const { numbers, rows: some } = this.state.inFlight.shift() ?? { numbers: [], rows: null };
    if (some === null && !event.rows.length) {
      for (const number of numbers) {
        const one = this.state.requests.get(number);
        if (one !== undefined) one.generated++;
      }
      return;
    }
    const rows = some ?? plainRows(numbers);
    const counts = rows.map((row) => (row.samples ? 1 : 0));
    for (const [index, count] of event.rows) counts[index] = count;
    rows.forEach((row, index) => {
      const one = this.state.requests.get(row.number);
      if (one === undefined) return;
      one.generated += counts[index];
      if (row.drafts && one.status === "running" && one.admission === row.admission) {
        one.computed -= row.drafts + 1 - counts[index];
      }
    });
  }

  // Applies the first `count` of several steps at once; the last of them is decided, without its tokens.
  advance(event, count) {
    const state = this.state;
    const more = count - this.numDone;
    for (const number of state.running) {
      const one = state.requests.get(number);
      one.computed += more;
      one.generated += this.numDone ? more : more - 1;
    }
    if (!this.numDone) {
      this._queue(event);
      this.numbers ??= [...state.running];
      state.batch = null;
      this.plain = this.numbers;
      this._blocksOf(this.numFrames, true);
    }
    state.time = event.time + event.passed[count - 1] / 1e6;
    this.numDone = count;
    this._takeUntil(count);
  }

  _steps(event) {
    const state = this.state;
    this.advance(event, event.count);
    for (const number of state.running) state.requests.get(number).generated++;
    state.time = event.time + event.passed[event.count] / 1e6;
    this.numDone = 0;
    this.numEnds = event.ends;
    this._takeUntil(Infinity);
    this._blocksOf(this.numFrames++, event.ends > 0);
  }

  _failed(event) {
    const state = this.state;
    state.inFlight.splice(state.inFlight.length - event.steps);
    state.running.forEach((number, index) => (state.requests.get(number).computed = event.computed[index]));
  }

  // ------------------------------------------------------------------------------------------------ blocks

  _openBlocks(columns) {
    const numBlocks = this.film.header.config.num_blocks;
    const state = this.state;
    this.blocks = { columns, at: 0, block: 0, value: 0, taken: [] }; // taken: in later steps of the same event
    state.references = new Int32Array(numBlocks);
    state.isCached = new Uint8Array(numBlocks);
    let at = 0;
    state.running.forEach((number, index) => {
      const table = columns.key_block.slice(at, at + columns.key_count[index]);
      at += table.length;
      state.requests.get(number).table = table;
      for (const block of table) state.references[block]++;
    });
    columns.key_held.forEach((block, index) => {
      state.held.set(block, columns.key_held_count[index]);
      state.references[block] += columns.key_held_count[index];
    });
    for (let block = 0; block < numBlocks; block++) state.isCached[block] = (columns.key_cached[block >> 3] >> (block & 7)) & 1;
  }

  _drop(one) {
    const { references, isCached } = this.state;
    const caches = this.film.header.config.enable_prefix_caching ? 1 : 0;
    for (const block of one.table) if (--references[block] === 0) isCached[block] = caches;
    one.table = [];
  }

  _blocksOf(frame, upToTables) {
    const own = this.blocks;
    if (own === null) return;
    const { columns } = own;
    const { references, isCached, held, requests } = this.state;
    const ops = this.names.block_ops;
    let end = own.at;
    while (end < columns.frame.length && columns.frame[end] <= frame) end++;
    if (upToTables) while (end > own.at && ops[columns.op[end - 1]] !== "stepped") end--;
    for (; own.at < end; own.at++) {
      const op = ops[columns.op[own.at]];
      const count = columns.count[own.at];
      const blocks = columns.block.slice(own.block, own.block + count);
      own.block += count;
      if (op === "blank" || op === "cached") {
        for (const block of blocks) isCached[block] = op === "cached" ? 1 : 0;
      } else if (op === "held") {
        blocks.forEach((block, index) => {
          const value = columns.value[own.value + index];
          references[block] += value - (held.get(block) ?? 0);
          if (value) held.set(block, value);
          else held.delete(block);
        });
        own.value += count;
      } else {
        const one = requests.get(columns.request[own.at]);
        if (one === undefined) throw new FilmError("blocks go to a request that does not run; the film is broken");
        if (op === "table") {
          for (const block of one.table) references[block]--;
          one.table = [];
        }
        if (op === "stepped") {
          blocks.forEach((block, index) => own.taken.push({ one, block, step: columns.value[own.value + index] }));
          own.value += count;
        } else {
          for (const block of blocks) this._take(one, block);
        }
      }
    }
    own.taken.sort((first, second) => first.step - second.step);
  }

  _take(one, block) {
    one.table.push(block);
    this.state.references[block]++;
    this.state.isCached[block] = 0;
  }

  _takeUntil(step) {
    const own = this.blocks;
    if (own === null) return;
    const isLater = (taken) => taken.step >= step;
    for (const { one, block } of own.taken.filter((taken) => !isLater(taken))) this._take(one, block);
    own.taken = own.taken.filter(isLater);
  }
}

if (typeof module !== "undefined") module.exports = { Film, FilmError, firstOf };
