// Counts a film's events up to each of its steps, in one walk over them: for counters, time line and diagram.
//
//     const counts = new Counts(film)
//     counts.at(17, 890)                             totals after the decision of step 890, in frame 17
//     counts.taken("waiting", "running", 17)         number of such moves of requests: on the way to frame 17, and in
// total     counts.itl[film.placeOf(17, 890)]              seconds; see below
//     counts.grow()                                  call it after the film has got more chunks

"use strict";

const BEHIND = WORDS.behind; // waiting without having been checked
const PLACES = ["new", "waiting", "parked", "running", "preempted", "finished", "refused"];
// Reasons to wait that more memory would remove.
const OF_MEMORY = new Set(["watermark", "full_sequence", "decode_reserve", "reserve", "bypass", "blocks", "preemption"]);

class Counts {
  constructor(film) {
    this.film = film;
    // After each frame's decision; for steps done at once, after their end. Totals, except the first three.
    Object.assign(this, {
      running: [], waiting: [], used: [], prefill: [], decode: [], cached: [], preempted: [], finished: [], evicted: [],
      waited: [], outOfMemory: [], refused: [],
    });
    // Of each step, by its place: its decision time, the time of its tokens, and the maximum inter-token latency of its
    // requests; 0: no request had an earlier token.
    Object.assign(this, { begins: [], ends: [], itl: [] });
    this.ofRequest = []; // its events, each with the frame that it led to
    this.preemptions = []; // {event, frame, resumedAfter, recomputed}, in order; the last two null: it has not resumed
    this.firstToken = []; // its time, by request; NaN: never, or before the film
    this.lastToken = []; // its time; NaN: unknown
    this.tokens = []; // their number, by request
    this.longestGap = []; // between two tokens, by request
    this.generated = 0; // tokens of all requests
    this.finishes = []; // finish events, in order, with their frames
    this.eventFrames = []; // frames that an event with a sentence, or about a request, led to
    this.moves = new Map(); // "waiting running" -> the frames that such moves led to
    this.counting = new Counting(this);
    this.grow();
  }

  grow() {
    this.counting.walk();
  }

  // The totals up to a step.
  at(frame, step) {
    const { numSteps, step: first } = this.film.frames[frame];
    const left = numSteps - 1 - (step - first); // steps that have not ended
    const isBlocked = this.waited[frame] > (frame ? this.waited[frame - 1] : 0);
    return {
      steps: this.film.placeOf(frame, step) + 1, prefill: this.prefill[frame],
      decode: this.decode[frame] - left * this.running[frame], cached: this.cached[frame],
      preempted: this.preempted[frame], finished: this.finished[frame], evicted: this.evicted[frame],
      waited: this.waited[frame] - (isBlocked ? left : 0), outOfMemory: this.outOfMemory[frame], refused: this.refused[frame],
    };
  }

  // The part of a total that one frame added.
  within(name, frame) {
    return this[name][frame] - (frame ? this[name][frame - 1] : 0);
  }

  taken(from, to, frame) {
    const frames = this.moves.get(`${from} ${to}`) ?? [];
    const until = firstOf(frames, (one) => one > frame);
    return { now: until - firstOf(frames, (one) => one >= frame), until };
  }

  // How long a request ran and waited, and why: {ran, waited: reason -> seconds, longest first, total}.
  lifeOf(number) {
    return this.counting.lives.of(number, this.film.end);
  }

  // The requests with the longest waits, at most `most`: {number, ran, waited, total}.
  longestWaits(most) {
    const all = this.ofRequest.map((_, number) => ({ number, ...this.lifeOf(number) })).filter((one) => one.total > 0);
    return all.sort((one, other) => other.total - one.total).slice(0, most);
  }

  // Frames before `frame` that an event led to, newest first.
  *framesBefore(frame) {
    for (let index = firstOf(this.eventFrames, (one) => one >= frame) - 1; index >= 0; index--) yield this.eventFrames[index];
  }
}

// How long requests ran and waited, and for what. The time behind others is summed for all requests together, by what
// the head of the queue lacks. Each request takes the difference between the sums at the beginning and the end of its
// wait.
class Lives {
  constructor(names) {
    this.names = names;
    this.now = NaN;
    this.behind = new Map();
    this.blocked = BEHIND;
    this.doing = new Map(); // of each unfinished request: {reason, since, behind}
    this.past = []; // of each request, by number: {ran, waited}
  }

  pass(now) {
    if (now !== this.now && !Number.isNaN(this.now)) this.behind.set(this.blocked, (this.behind.get(this.blocked) ?? 0) + now - this.now);
    this.now = now;
  }

  block(reason) {
    this.blocked = reason ? `${BEHIND}, ${this.names.reasons[reason - 1]}` : BEHIND;
  }

  begin(number, reason) {
    this.doing.set(number, { reason, since: this.now, behind: reason === BEHIND ? new Map(this.behind) : null });
  }

  change(event) {
    const { request: number, op } = event;
    const { names } = this;
    if (["queued", "preempted", "rolled_back"].includes(op)) this._become(number, BEHIND);
    else if (op === "parked") this._become(number, names.statuses[event.status]);
    else if (op === "deferred") this._become(number, names.reasons[event.reason]);
    else if (op === "admitted") this._become(number, "running");
    else if (op === "finished" || op === "refused") this._become(number, null);
  }

  _become(number, reason) {
    this.past[number] = this.of(number, this.now);
    this.doing.delete(number);
    if (reason !== null) this.begin(number, reason);
  }

  // Up to a time at or after the newest event.
  of(number, now) {
    let { ran, waited } = this.past[number] ?? { ran: 0, waited: new Map() };
    const doing = this.doing.get(number);
    if (doing !== undefined) {
      waited = new Map(waited);
      const add = (name, time) => time && waited.set(name, (waited.get(name) ?? 0) + time);
      const more = Math.max(0, now - this.now);
      if (doing.reason === "running") ran += this.now + more - doing.since;
      else if (doing.reason !== BEHIND) add(doing.reason, this.now + more - doing.since);
      else {
        for (const [name, time] of this.behind) add(name, time - (doing.behind.get(name) ?? 0));
        add(this.blocked, more);
      }
      waited = new Map([...waited].sort((one, other) => other[1] - one[1]));
    }
    return { ran, waited, total: [...waited.values()].reduce((sum, time) => sum + time, 0) };
  }
}

// The walk over the events.
class Counting {
  constructor(counts) {
    this.counts = counts;
    this.film = counts.film;
    this.names = this.film.header.names;
    this.chunk = 0; // index of the next chunk
    this.frame = 0; // the frame that the next event leads to
    this.place = 0; // of the next step
    this.places = []; // of requests, by number
    this.admissions = [];
    this.preempted = []; // the newest preemption of each request
    this.total = { prefill: 0, decode: 0, cached: 0, preempted: 0, finished: 0, evicted: 0, waited: 0, outOfMemory: 0, refused: 0 };
    this.running = []; // replaced, not changed: steps in flight keep the old list
    this.before = new Set(); // requests that may have had a token before the film
    this.numIn = PLACES.map(() => 0);
    this.lives = new Lives(this.names);
  }

  walk() {
    for (let number = this.places.length; number < this.film.requests.length; number++) {
      this.counts.ofRequest.push([]);
      this.counts.firstToken.push(NaN);
      this.counts.lastToken.push(NaN);
      this.counts.tokens.push(0);
      this.counts.longestGap.push(0);
      this.places.push(0);
      this.admissions.push(0);
    }
    for (; this.chunk < this.film.chunks.length; this.chunk++) {
      const key = this.film.beginning(this.chunk);
      if (this.chunk === 0 || !this._agreesWith(key)) this._begin(key);
      for (const event of this.film.chunks[this.chunk].list) {
        this.lives.pass(event.time);
        if (event.request === null) this[`_${event.op}`]?.(event);
        else this._ofRequest(event, event.request);
      }
    }
  }

  // Whether no event is missing before a key frame.
  _agreesWith(key) {
    const numIn = (name) => this.numIn[PLACES.indexOf(name)];
    const isIn = (...names) => (number) => names.includes(PLACES[this.places[number]]);
    return key.parked.length === numIn("parked") && key.waiting.length === numIn("waiting") + numIn("preempted") &&
      key.running.length === this.running.length && key.running.every((number, place) => number === this.running[place]) &&
      key.waiting.every(isIn("waiting", "preempted")) && key.parked.every(isIn("parked"));
  }

  _begin(key) {
    const isOver = (place) => PLACES[place] === "finished" || PLACES[place] === "refused";
    this.places = this.places.map((place) => (isOver(place) ? place : 0));
    this.numIn = this.numIn.map((count, place) => (isOver(place) ? count : 0));
    this.counts.lastToken.fill(NaN);
    this.running = [...key.running];
    this.lives.now = key.time;
    this.lives.doing.clear(); // missed events are unknown
    this.computing = new Set(); // running requests that still compute their prompt, or recompute
    for (const one of key.requests.values()) {
      this.before.add(one.number);
      const known = one.prompt + one.generated;
      if (one.status === "running" && one.computed < known - 1) this.computing.add(one.number);
      this.places[one.number] = PLACES.indexOf(key.parked.includes(one.number) ? "parked" : one.status);
      this.admissions[one.number] = one.admission;
      const isParked = key.parked.includes(one.number);
      this.lives.begin(one.number, one.status === "running" ? "running" : one.reason ?? (isParked ? one.status : BEHIND));
      this.numIn[this.places[one.number]]++;
    }
    this.flight = key.inFlight.map(({ rows }) => ({
      place: null, numbers: rows.map((row) => row.number), samples: rows.map((row) => row.samples),
    }));
  }

  _ofRequest(event, number) {
    const { counts, total } = this;
    counts.ofRequest[number].push({ event, frame: this.frame });
    this.lives.change(event);
    this._noteFrame();
    switch (event.op) {
      case "rolled_back":
        this.admissions[number]--;
      // falls through
      case "queued":
        this._move(number, this.admissions[number] ? "preempted" : "waiting");
        break;
      case "parked":
        this._move(number, "parked");
        break;
      case "admitted":
        this._move(number, "running");
        this.admissions[number]++;
        this.computing.add(number);
        total.cached += event.cached;
        if (number in this.preempted) {
          const before = this.preempted[number];
          before.resumedAfter = event.time - before.event.time;
          before.recomputed = Math.max(0, before.event.lost - event.cached);
        }
        break;
      case "preempted":
        this._move(number, "preempted");
        this.preempted[number] = { event, frame: this.frame, resumedAfter: null, recomputed: null };
        counts.preemptions.push(this.preempted[number]);
        total.preempted++;
        total.outOfMemory += this.names.causes[event.cause] === "memory" ? 1 : 0;
        break;
      case "refused":
        this._move(number, "refused");
        total.refused++;
        break;
      case "finished": {
        const isRefused = this.names.finish_reasons[event.reason] === "refused";
        this._move(number, isRefused ? "refused" : "finished");
        total[isRefused ? "refused" : "finished"]++;
        counts.finishes.push({ event, frame: this.frame });
        break;
      }
      case "extended":
        this.counts.lastToken[number] = NaN; // the next token is the first one of another part
        break;
    }
  }

  _move(number, name) {
    const from = this.places[number];
    const to = PLACES.indexOf(name);
    if (from === to) return;
    const { moves } = this.counts;
    const key = `${PLACES[from]} ${name}`;
    if (!moves.has(key)) moves.set(key, []);
    moves.get(key).push(this.frame);
    if (PLACES[from] === "running") {
      this.running = this.running.filter((other) => other !== number);
      this.computing.delete(number);
    } else if (name === "running") this.running = [...this.running, number];
    this.places[number] = to;
    this.numIn[from]--;
    this.numIn[to]++;
  }

  _step(event) {
    let numbers = this.running;
    let samples = null; // all
    let prefill = this.computing.size;
    let tokens = numbers.length;
    if (event.rows.length) {
      const counts = new Array(numbers.length).fill(1);
      samples = new Array(numbers.length).fill(true);
      let row = 0;
      for (const [ahead, count, flags] of event.rows) {
        row += ahead;
        counts[row] = count;
        samples[row] = (flags & 1) === 1;
        tokens += count - 1;
        prefill += this.computing.has(numbers[row]) ? count - 1 : 0;
      }
      if (this.computing.size) numbers.forEach((number, index) => samples[index] && this.computing.delete(number));
      if (counts.includes(0)) {
        samples = samples.filter((_, index) => counts[index]);
        numbers = numbers.filter((_, index) => counts[index]);
      }
    } else this.computing.clear();
    this.total.prefill += prefill;
    this.total.decode += tokens - prefill;
    this.counts.begins.push(event.time);
    this.counts.ends.push(event.time);
    this.counts.itl.push(0);
    this.flight.push({ place: this.place, numbers, samples });
    this._frame(event, 1);
  }

  _update(event) {
    const { place, numbers, samples } = this.flight.shift() ?? { place: null, numbers: [], samples: null };
    let odd = 0;
    let longest = 0;
    for (let row = 0; row < numbers.length; row++) {
      let count = samples === null || samples[row] ? 1 : 0;
      if (odd < event.rows.length && event.rows[odd][0] === row) count = event.rows[odd++][1];
      if (count) longest = Math.max(longest, this._token(numbers[row], event.time, count));
    }
    if (place === null) return;
    this.counts.ends[place] = event.time;
    this.counts.itl[place] = longest;
  }

  // `count` tokens came at once; returns the time since the previous token.
  _token(number, time, count) {
    const { counts } = this;
    const gap = Math.max(0, time - counts.lastToken[number]) || 0; // NaN: the first token
    counts.lastToken[number] = time;
    counts.longestGap[number] = Math.max(counts.longestGap[number], gap);
    counts.tokens[number] += count;
    counts.generated += count;
    if (Number.isNaN(counts.firstToken[number]) && !this.before.has(number)) counts.firstToken[number] = time;
    return gap;
  }

  _steps(event) {
    const { begins, ends, itl } = this.counts;
    const { passed, count, time } = event;
    for (let step = 0; step < count; step++) {
      begins.push(time + passed[step] / 1e6);
      ends.push(time + passed[step + 1] / 1e6);
      itl.push((passed[step + 1] - passed[step]) / 1e6);
    }
    let longest = 0;
    const later = itl.slice(this.place + 1).reduce((most, gap) => Math.max(most, gap), 0);
    for (const number of this.running) {
      longest = Math.max(longest, this._token(number, ends[this.place], count));
      this.counts.longestGap[number] = Math.max(this.counts.longestGap[number], later);
      this.counts.lastToken[number] = time + passed[count] / 1e6;
    }
    itl[this.place] = longest;
    this.total.decode += count * this.running.length;
    this._frame(event, count);
  }

  _failed(event) {
    this.flight.splice(Math.max(0, this.flight.length - event.steps));
    this._noteFrame();
  }

  _paused() {
    this._noteFrame();
  }

  _limited() {
    this._noteFrame();
  }

  _noteFrame() {
    if (this.counts.eventFrames.at(-1) !== this.frame) this.counts.eventFrames.push(this.frame);
  }

  _frame(event, count) {
    const { counts, total } = this;
    const { num_blocks: numBlocks, num_reserved_blocks: numReserved } = this.film.header.config;
    total.evicted += event.evicted;
    this.lives.block(event.blocked);
    if (event.blocked && OF_MEMORY.has(this.names.reasons[event.blocked - 1])) total.waited += count;
    for (const [name, value] of Object.entries(total)) counts[name].push(value);
    counts.running.push(this.running.length);
    counts.waiting.push(this.numIn[PLACES.indexOf("waiting")] + this.numIn[PLACES.indexOf("preempted")]);
    counts.used.push(1 - event.free / (numBlocks - numReserved));
    this.frame++;
    this.place += count;
  }
}

if (typeof module !== "undefined") module.exports = { BEHIND, Counts, PLACES };
