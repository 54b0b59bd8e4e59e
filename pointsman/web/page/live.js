// The live page: shows the current decisions of a scheduler. It requests /live/film, with the key that the user typed
// or the token in its own address (#token=...). The records are those of pointsman/web/live.py: H a header, P a part, S
// counts. A part and the header are a film with request numbers of its own; here the parts are joined.

"use strict";

const limits = { seconds: 300, bytes: 32 * 2 ** 20 }; // of the film that is kept; bytes of parts as received
const SLACK = 1.1; // excess over the limits before old chunks are dropped
const SILENCE = 30e3; // milliseconds of silence after which a connection is closed
const FIRST_WAIT = 1; // seconds until the next attempt, doubled each time
const LONGEST_WAIT = 30;
const SELDOM = 500; // milliseconds between two drawings of expensive parts

// ---------------------------------------------------------------------------------------------------- parts as one film

class LiveFilm extends Film {
  constructor() {
    super();
    this.requests = [];
    this.chunks = [];
    this.frames = [];
    this.numSteps = 0;
    this.unpacked = [];
    this.counts = null;
    this.isComplete = true;
    this.numDropped = 0; // frames
    this.known = new Map(); // requests by id and arrival
  }

  // Appends a part, and uses it up.
  join(film, numBytes) {
    this.header = film.header;
    this.hasBlocks = film.hasBlocks;
    this.end = film.end;
    const numbers = film.requests.map((one) => this._numberOf(one));
    for (const frame of film.frames) {
      this.frames.push({ ...frame, chunk: frame.chunk + this.chunks.length, before: this.numSteps + frame.before });
    }
    this.numSteps += film.numSteps;
    for (const chunk of film.chunks) {
      renumber(chunk, numbers);
      chunk.numBytes = numBytes / film.chunks.length;
      this.chunks.push(chunk);
    }
    if (this.counts === null) this.counts = new Counts(this);
    else this.counts.grow();
  }

  get begin() {
    return this.frames[0].time;
  }

  _numberOf(request) {
    const name = JSON.stringify([request.id, request.arrival]);
    let number = this.known.get(name);
    if (number === undefined) {
      number = this.requests.push(request) - 1;
      this.known.set(name, number);
    }
    return number;
  }

  // Drops the oldest chunks if there is too much. Returns the changes of frames and of request numbers; null: none.
  dropOldest() {
    let numBytes = this.chunks.reduce((sum, chunk) => sum + chunk.numBytes, 0);
    const beginOf = (chunk) => chunk.events.key_time[0] / 1e6;
    if (numBytes <= SLACK * limits.bytes && this.end - beginOf(this.chunks[0]) <= SLACK * limits.seconds) return null;
    let count = 0;
    while (count + 1 < this.chunks.length && (numBytes > limits.bytes || this.end - beginOf(this.chunks[count]) > limits.seconds)) {
      numBytes -= this.chunks[count++].numBytes;
    }
    const first = this.frames.findIndex((frame) => frame.chunk >= count);
    const numFrames = first < 0 ? this.frames.length - 1 : first;
    this.chunks.splice(0, count);
    this.frames.splice(0, numFrames);
    const numSteps = this.frames[0].before;
    this.numSteps -= numSteps;
    for (const frame of this.frames) {
      frame.chunk -= count;
      frame.before -= numSteps;
    }
    this.numDropped += numFrames;
    const numbers = [];
    const kept = [...new Set(this.chunks.flatMap((chunk) => chunk.numbers))].sort((one, other) => one - other);
    const requests = kept.map((number) => this.requests[number]);
    kept.forEach((number, place) => (numbers[number] = place));
    this.requests.length = 0;
    this.known.clear();
    for (const request of requests) this._numberOf(request);
    for (const chunk of this.chunks) renumber(chunk, numbers);
    this.unpacked = [];
    this.counts = new Counts(this);
    return { numFrames, numbers };
  }

  async loadBlocks(frame) {
    const chunk = this.chunks[this.frames[frame].chunk];
    await super.loadBlocks(frame);
    if (chunk.blocks !== null && !chunk.blocks.isOurs) {
      chunk.blocks.request = chunk.blocks.request.map((number) => chunk.numbers[number] ?? 0);
      chunk.blocks.isOurs = true;
    }
  }

  // A part's key frame has the reason of each waiting request, but not its holder, which an earlier part has.
  stateAt(frame, ...more) {
    const state = super.stateAt(frame, ...more);
    const wanted = new Set([...state.skipped, state.blocker].filter((number) => state.requests.get(number)?.holder === null));
    for (let index = this.frames[frame].chunk - 1; index >= 0 && wanted.size; index--) {
      const { list } = this.chunks[index];
      for (let place = list.length - 1; place >= 0; place--) {
        const event = list[place];
        if (event.op === "deferred" && wanted.delete(event.request) && event.holder) {
          state.requests.get(event.request).holder = event.holder - 1;
        }
      }
    }
    return state;
  }
}

// Gives the requests of a chunk their numbers among all requests.
function renumber(chunk, numbers) {
  const of = (number) => numbers[number];
  const orNone = (number) => (number ? numbers[number - 1] + 1 : 0);
  const keys = Object.entries(chunk.events).filter(([name]) => name.startsWith("key_"));
  chunk.events = Object.fromEntries(keys);
  for (const name of ["key_running", "key_waiting", "key_parked"]) chunk.events[name] = chunk.events[name].map(of);
  chunk.events.key_flight_request = chunk.events.key_flight_request.map(orNone);
  for (const event of chunk.list) {
    if (event.request !== null) event.request = of(event.request);
    if ("holder" in event) event.holder = orNone(event.holder);
    if ("by" in event) event.by = orNone(event.by);
    if ("blocker" in event) event.blocker = orNone(event.blocker);
    if (event.skipped) event.skipped = event.skipped.map(of);
  }
  chunk.numbers = chunk.numbers === undefined ? numbers : chunk.numbers.map(of);
  chunk.blocks = chunk.walk = null;
}

// ---------------------------------------------------------------------------------------------------- what is shown

class LiveView extends View {
  constructor(root, options) {
    super(root, options);
    this.isHeld = false; // a pointer is down: its target must stay
    this.drawn = -Infinity;
    this.part("decided").setAttribute("aria-live", "off"); // it changes too often to be read out
    root.addEventListener("pointerdown", () => (this.isHeld = true));
    for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, () => (this.isHeld = false));
  }

  get follows() {
    return this.film === null || this.place + 1 >= this.film.numSteps;
  }

  // Whether the view must stay unchanged: it is not visible, or has the pointer or the focus.
  get rests() {
    const focus = document.activeElement;
    const isOnEntry = this.root.contains(focus) && focus.closest(".requests, [data-part=moments]") !== null;
    return document.hidden || this.isHeld || isOnEntry;
  }

  begin(film) {
    this.stop();
    this.film = film;
    this._count();
    this._toLast();
    this.choose(null, false);
    this.drawn = -Infinity;
  }

  _count() {
    this.counts = this.film.counts;
    this.teller = new Teller(this.film, this.counts);
    this.line = new TimeLine(this.film, this.counts);
  }

  _toLast() {
    const { frames } = this.film;
    this.frame = frames.length - 1;
    this.step = frames[this.frame].step + frames[this.frame].numSteps - 1;
  }

  // More has arrived; the page shows the newest frame if it did before.
  async grow(wasAtEnd) {
    const { film } = this;
    const gone = film.dropOldest();
    if (gone !== null) {
      this._count();
      const chosen = this.chosen === null ? undefined : gone.numbers[this.chosen];
      if (this.frame < gone.numFrames) this.step = film.frames[0].step;
      this.frame = Math.max(0, this.frame - gone.numFrames);
      if (chosen === undefined && this.chosen !== null) this.choose(null, false);
      else this.chosen = chosen ?? null;
    }
    const last = film.frames.at(-1);
    this.part("number").min = film.frames[0].step;
    this.part("number").max = last.step + last.numSteps - 1;
    this.part("line").setAttribute("aria-valuemax", film.numSteps - 1);
    if (wasAtEnd) this._toLast();
    if (!document.hidden && performance.now() > this.drawn + SELDOM) this.drawSeldom();
    if ((wasAtEnd || gone !== null) && !this.rests) await this.show(this.frame, this.step);
    else this.part("hand").style.left = `${this.line.shareOf(film.timeOf(this.frame, this.step)) * 100}%`;
  }

  drawSeldom() {
    this.drawn = performance.now();
    this.drawAbout();
    this.line = new TimeLine(this.film, this.counts);
    this.drawLine();
    const life = this.part("life");
    if (this.chosen !== null && !life.contains(document.activeElement) && !this.isHeld) this.choose(this.chosen, false);
    if (!this.part("most").contains(document.activeElement) && !this.isHeld) this.drawMost();
  }

  drawAbout() {
    const { film } = this;
    const { config } = film.header;
    const option = (one) => Object.assign(document.createElement("option"), { value: one.id });
    if (document.activeElement !== this.part("find")) {
      this.part("ids").replaceChildren(...film.requests.slice(-MAX_IDS).map(option));
    }
    this.part("about").textContent =
      `${thousands(film.requests.length)} requests in the last ${(film.end - film.frames[0].time).toFixed(0)} s; ` +
      `${thousands(config.num_blocks)} blocks of ${config.block_size} tokens, a budget of ` +
      `${thousands(config.max_num_batched_tokens)} tokens, ${config.max_num_seqs} sequences, order ${config.order}`;
  }
}

function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

const view = new LiveView($("live"), { onProblem: problem, onShow: () => tell() });
let film = null; // that grows
let counts = null; // from the newest S
let arrived = performance.now(); // time of the newest part
let isLinked = false;
let note = ""; // why the film begins again
let engine = 0; // whose scheduler is watched
let watching = null; // ends the connection
let jumps = false; // to the next part, whatever is shown

function tell() {
  const isNow = view.follows && (view.film === film || film === null); // null: nothing has arrived since the connection
  $("now").hidden = isNow;
  if (isLinked) setText("link", isNow ? `Live${note}` : "You look back; the scheduler continues");
  if (counts === null) return;
  const silence = (performance.now() - arrived) / 1e3;
  const isSilent = film === null || silence > Math.max(2, 2 * counts.interval);
  const since = film === null ? "since you began to watch" : `for ${silence.toFixed(0)} s`;
  const seldom = counts.interval > 0.15
    ? `. A picture each ${counts.interval.toFixed(1)} s: with so many requests, more would cost over 1 % of the time` : "";
  setText("counts", `${thousands(counts.running)} running, ${thousands(counts.waiting)} waiting, ` +
    `${thousands(counts.parked)} parked now${isSilent ? `; no step was decided ${since}` : ""}${seldom}`);
  const told = [];
  if (counts.dropped) told.push(`${counted(counts.dropped, "frame")} dropped: this page, or the connection, is too slow.`);
  if (film?.numDropped) {
    told.push(`The last ${limits.seconds / 60} minutes are kept, at most ${limits.bytes / 2 ** 20} MB; ${counted(film.numDropped, "older frame")} dropped.`);
  }
  setText("lost", told.join(" "));
}

// ---------------------------------------------------------------------------------------------------- what comes

class Refusal extends Error {}

// The whole records of a stream, one after the other.
async function* recordsOf(body, onBytes) {
  let left = new Uint8Array(0);
  const reader = body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    onBytes();
    const bytes = new Uint8Array(left.length + value.length);
    bytes.set(left);
    bytes.set(value, left.length);
    const head = new DataView(bytes.buffer);
    let at = 0;
    while (at + 5 <= bytes.length && at + 5 + head.getUint32(at + 1, true) <= bytes.length) {
      const after = at + 5 + head.getUint32(at + 1, true);
      yield [String.fromCharCode(bytes[at]), bytes.subarray(at + 5, after)];
      at = after;
    }
    left = bytes.subarray(at);
  }
}

// Lists the engines that the server reports, if there are several.
function offerEngines(number) {
  if (number < 2 || $("engine").options.length === number) return;
  $("engine").replaceChildren(...Array.from({ length: number }, (_, index) => new Option(index, index)));
  $("engine").value = engine;
  $("choice").hidden = false;
}

async function watch(key) {
  const stop = new AbortController();
  watching = stop;
  let timer = null;
  const onBytes = () => {
    clearTimeout(timer);
    timer = setTimeout(() => stop.abort(), SILENCE);
  };
  onBytes();
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch(engine ? `/live/film?engine=${engine}` : "/live/film", { headers, cache: "no-store", signal: stop.signal });
    if (!answer.ok) {
      const { error } = await answer.json().catch(() => ({}));
      const why = error?.message ?? error ?? `status ${answer.status}`;
      if (answer.status === 401 || answer.status === 403) throw new Refusal(why);
      throw new Error(why);
    }
    $("ask").hidden = true;
    problem(null);
    isLinked = true;
    offerEngines(Number(answer.headers.get("X-Engines")));
    let header = null;
    for await (const [kind, bytes] of recordsOf(answer.body, onBytes)) {
      if (kind === "H") {
        header = bytes.slice();
        if (film !== null) note = ", from the beginning: what was before the interruption is gone";
        film = null;
      } else if (kind === "S") {
        counts = JSON.parse(new TextDecoder().decode(bytes));
      } else if (kind === "P") {
        await take(header, bytes);
      }
      tell();
    }
  } finally {
    clearTimeout(timer);
    stop.abort();
    isLinked = false;
  }
}

async function take(header, part) {
  const bytes = new Uint8Array(header.length + part.length);
  bytes.set(header);
  bytes.set(part, header.length);
  const more = await Film.read(bytes.buffer);
  const follows = view.follows || jumps;
  jumps = false;
  arrived = performance.now();
  if (film === null) film = new LiveFilm();
  film.join(more, part.length);
  if (view.film === film) await view.grow(follows);
  else if (follows) await toNow();
  else film.dropOldest(); // the user looks at the film before an interruption
}

async function toNow() {
  jumps = film === null;
  if (jumps) return;
  $("live").hidden = false;
  if (view.film !== film) view.begin(film);
  view.stop();
  await view.grow(true);
}

let endPause = () => {}; // begins the next attempt now

function pause(time) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, time * 1e3);
    endPause = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

// Watches until it ends; reconnects after an interruption.
async function stay(key) {
  let wait = FIRST_WAIT;
  for (;;) {
    const began = performance.now();
    const watched = engine;
    try {
      await watch(key);
      setText("link", "The server has ended the film");
    } catch (error) {
      if (error instanceof Refusal) {
        problem(key ? error.message : null);
        setText("link", key ? "Refused" : "The server asks for an operator's key");
        $("ask").hidden = false;
        if (!location.hash.includes("token=")) $("key").focus();
        return;
      }
      if (error instanceof FilmError) return problem(`the film cannot be shown: ${error.message}; load the page again`);
      setText("link", `No connection (${error.name === "AbortError" ? "the server is silent" : error.message})`);
    }
    if (engine !== watched) {
      wait = FIRST_WAIT;
      continue;
    }
    if (performance.now() - began > 1e4) wait = FIRST_WAIT;
    $("link").textContent += `; the next attempt is in ${wait} s`;
    await pause(wait);
    wait = engine === watched ? Math.min(LONGEST_WAIT, 2 * wait) : FIRST_WAIT;
  }
}

function begin() {
  document.addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT"].includes(event.target.tagName);
    if (event.key === "n" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) toNow();
    else view.handleKey(event);
  });
  $("now").addEventListener("click", toNow);
  $("engine").addEventListener("change", () => {
    engine = Number($("engine").value);
    film = counts = null; // another scheduler's film begins
    jumps = true;
    note = "";
    watching?.abort();
    endPause();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = $("key").value;
    $("key").value = "";
    $("ask").hidden = true;
    problem(null);
    setText("link", "Connecting");
    stay(key);
  });
  setInterval(tell, 1000);
  stay(new URLSearchParams(location.hash.slice(1)).get("token"));
}

begin();
