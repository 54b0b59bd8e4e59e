// One view of a film: time line, controls, counters, decisions, queue, running requests, batch, pool, states, one
// request's life. Its data comes from film.js and counts.js, its sentences from story.js. A page may hold several
// views.
//
//     const view = new View(element, { onProblem: (text) => ..., onShow: (view) => ... })
//     await view.open(arrayBuffer, "run.film")
//     await view.show(17)          frame 17, at its first step
//     await view.show(17, 890)     at step 890, one of its steps
//     view.frame, view.step        the shown frame and step

"use strict";

const MAX_ROWS = 200; // requests in a list
const MAX_CELLS = 4096; // maximum cells; with more blocks, a cell shows several
const MAX_FINISHED = 50;
const MAX_OF_LOG = 40; // sentences of the log
const MAX_DRAWS = 50; // a second, while it plays
const COUNTERS = [
  ["steps", "steps"], ["prefill", "tokens prefilled"], ["decode", "tokens decoded"], ["cached", "tokens cached"],
  ["preempted", "preemptions"], ["evicted", "blocks evicted"], ["finished", "finished"], ["refused", "refused"],
];
const MAX_IDS = 2000; // maximum ids offered while typing
const MAX_WAITS = 20; // rows of the longest waits
const MAX_REASONS = 3; // reasons of a wait in this table

const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seconds = (time) => `${time.toFixed(3)} s`;

function swatch(name) {
  const found = document.createElement("i");
  found.style.background = `var(${name})`;
  return found;
}

function item(...parts) {
  const found = document.createElement("li");
  found.append(...parts);
  return found;
}

function span(name, text) {
  const found = document.createElement("span");
  found.className = name;
  found.textContent = text;
  return found;
}

function bar(...parts) {
  const found = document.createElement("div");
  found.className = "bar";
  for (const [name, share] of parts) {
    const part = span(name, "");
    part.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    found.append(part);
  }
  return found;
}

// kind: "th" for a head. The first cell of a row is its head.
function tableRow(kind, ...cells) {
  const found = document.createElement("tr");
  cells.forEach((cell, index) => {
    const made = document.createElement(kind === "th" || index === 0 ? "th" : "td");
    if (made.tagName === "TH") made.scope = kind === "th" ? "col" : "row";
    made.append(cell);
    found.append(made);
  });
  return found;
}

// Shows an error in the page's place for errors; null: clears it.
function problem(text) {
  $("problem").hidden = text === null;
  $("problem").textContent = text ?? "";
}

// The bytes of base64 text.
function bytesOf(base64) {
  const text = atob(base64.trim());
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
  return bytes.buffer;
}

// The bytes of a data block that the page carries.
const carriedBytes = (element) => bytesOf(element.textContent);

let numViews = 0;

class View {
  // root: gets the markup of the template "view". onProblem: called with an error, or null; onShow: after a frame was
  // shown; onChoose: after a request was chosen or deselected.
  constructor(root, { onProblem, onShow = () => {}, onChoose = () => {} }) {
    root.append($("view").content.cloneNode(true));
    root.classList.add("view");
    this.root = root;
    this.parts = new Map([...root.querySelectorAll("[data-part]")].map((one) => [one.dataset.part, one]));
    this.problem = onProblem;
    this.onShow = onShow;
    this.onChoose = onChoose;
    this.film = null;
    this.teller = null;
    this.counts = null;
    this.line = null;
    this.frame = 0;
    this.step = 0; // step id, within the frame
    this.chosen = null; // the number of a request
    this.timer = null;
    this.plays = 0; // counts calls of play: a slow step of an earlier call stops
    this.shown = 0; // counts calls of show: a slower earlier one is dropped
    this.opens = 0; // counts calls of open, likewise
    this.cell = 0; // cell of the pool with the keyboard focus
    this.cells = null; // of the pool: {columns, size, perCell, count}
    this.part("ids").id = `ids-${++numViews}`;
    this.part("find").setAttribute("list", this.part("ids").id);
    this.diagram = new Diagram(this.part("states"), this.part("says"));
    this.listen();
  }

  // The index of the step among all steps, from 0.
  get place() {
    return this.film.placeOf(this.frame, this.step);
  }

  part(name) {
    return this.parts.get(name);
  }

  listen() {
    const on = (name, event, action) => this.part(name).addEventListener(event, action);
    const to = (place) => () => { this.stop(); this.showPlace(place()); };
    on("reset", "click", to(() => 0));
    on("back", "click", to(() => this.place - 1));
    on("step", "click", to(() => this.place + 1));
    on("play", "click", () => this.play());
    on("preemption", "click", () => this.toPreemption(1));
    on("number", "change", () => this.showStep(Number(this.part("number").value)));
    on("find", "change", () => this.part("find").value && this.find(this.part("find").value));
    on("line", "pointerdown", (event) => { this.stop(); this.part("line").setPointerCapture(event.pointerId); this.press(event); });
    on("line", "pointermove", (event) => (event.buttons ? this.scrub(event) : this.point(event)));
    on("pool", "pointermove", (event) => this.hover(event));
    on("pool", "keydown", (event) => this.moveCell(event));
    on("diagram", "toggle", () => this.film !== null && this.redraw());
    on("most", "toggle", () => this.film !== null && this.drawMost());
    const again = () => { if (this.film !== null) { this.drawLine(); this.redraw(); } };
    window.addEventListener("resize", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  }

  // Shows a film at its beginning; false: it is not a film, and the previous one stays.
  async open(buffer, name) {
    this.stop();
    const call = ++this.opens;
    let film;
    try {
      film = await Film.read(buffer);
      if (call !== this.opens) return false; // another one has been opened since
      const counts = new Counts(film);
      const line = new TimeLine(film, counts);
      Object.assign(this, { film, counts, line, teller: new Teller(film, counts) });
    } catch (error) {
      if (call !== this.opens) return false;
      this.problem(error instanceof FilmError ? `${name}: ${error.message}` : `${name} cannot be shown: ${error.message}`);
      return false;
    }
    this.problem(null);
    this.frame = this.cell = 0;
    this.step = film.frames[0].step;
    this.choose(null, false);
    const { config } = film.header;
    const last = film.frames.at(-1);
    const whole = film.isComplete ? "" : "; it was cut off";
    this.part("about").textContent =
      `${thousands(film.requests.length)} requests, ${thousands(film.numSteps)} steps, ` +
      `${film.end.toFixed(1)} s; ${thousands(config.num_blocks)} blocks of ${config.block_size} tokens, a budget of ` +
      `${thousands(config.max_num_batched_tokens)} tokens, ${config.max_num_seqs} sequences, order ${config.order}${whole}`;
    const option = (one) => Object.assign(document.createElement("option"), { value: one.id });
    this.part("ids").replaceChildren(...film.requests.slice(0, MAX_IDS).map(option));
    this.part("number").max = last.step + last.numSteps - 1;
    this.part("number").min = film.frames[0].step;
    this.part("line").setAttribute("aria-valuemax", film.numSteps - 1);
    this.drawMost();
    return true;
  }

  // ---------------------------------------------------------------------------------------------------- the time line

  canvasOf(id, height) {
    const canvas = this.part(id);
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    const width = canvas.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    return { context, width, height };
  }

  drawLine() {
    const { context, width } = this.canvasOf("line", LINE_HEIGHT);
    this.line.draw(context, width, this.part("line").width, this.chosen);
    const legend = this.line.legend().flatMap(([name, text]) => [swatch(name), ` ${text} `]);
    this.part("lineLegend").replaceChildren(...legend);
  }

  // On the mark of a preemption: to its step. Otherwise to the step under the pointer.
  press(event) {
    const frame = this.markAt(event);
    if (frame === null) this.scrub(event);
    else this.show(frame);
  }

  point(event) {
    if (this.film === null) return;
    const frame = this.markAt(event);
    const preemption = frame === null ? undefined : this.film.eventsOf(frame).find(({ op }) => op === "preempted");
    this.part("line").title = preemption === undefined ? "" : this.teller.sentence(preemption);
    this.part("line").style.cursor = frame === null ? "" : "pointer";
  }

  markAt(event) {
    const box = this.part("line").getBoundingClientRect();
    return this.line.markAt(event.clientX - box.left, event.clientY - box.top, box.width);
  }

  // To the next step that preempted, or with -1 to the previous one.
  toPreemption(by) {
    this.stop();
    const { preemptions } = this.counts;
    const isAfter = ({ frame }) => (by > 0 ? frame > this.frame : frame >= this.frame);
    const found = preemptions[firstOf(preemptions, isAfter) - (by > 0 ? 0 : 1)];
    if (found !== undefined && found.frame < this.film.frames.length) this.show(found.frame);
    else this.problem(`no preemption ${by > 0 ? "after" : "before"} this step`);
  }

  scrub(event) {
    const box = this.part("line").getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    this.showPlace(this.film.placeAt(this.line.timeAt(share)));
  }

  // ---------------------------------------------------------------------------------------------------- a frame

  // Shows a step of a frame, by default its first; after the last frame, the last step of all.
  async show(index, step = null) {
    const { frames } = this.film;
    this.frame = Math.min(Math.max(index, 0), frames.length - 1);
    const { step: first, numSteps } = frames[this.frame];
    this.step = index >= frames.length ? first + numSteps - 1 : step ?? first;
    if (await this.redraw()) this.onShow(this);
  }

  // The lists about the whole film, if they are open.
  drawMost() {
    if (!this.part("most").open) return;
    const waits = this.counts.longestWaits(MAX_WAITS);
    this.part("noWait").textContent = waits.length ? "" : "No request waited.";
    this.part("waits").replaceChildren(...(waits.length ? [tableRow("th", "request", "waited", "ran", "most of it for")] : []), ...waits.map((one) => {
      const reasons = [...one.waited].slice(0, MAX_REASONS).map(([why, time]) => `${words(why)} ${seconds(time)}`);
      return tableRow("td", this.chooser(one.number), seconds(one.total), seconds(one.ran), reasons.join("; "));
    }));
    const { preemptions } = this.counts;
    const recomputed = preemptions.reduce((sum, one) => sum + (one.recomputed ?? 0), 0);
    this.part("preemptionsTitle").textContent = `${counted(preemptions.length, "preemption")}, ${counted(recomputed, "token")} recomputed`;
    this.list("preemptions", preemptions, (one) => {
      const { event, frame } = one;
      const button = document.createElement("button");
      button.textContent = seconds(event.time);
      button.addEventListener("click", () => { this.stop(); this.show(frame); });
      return item(button, `${this.teller.sentence(event)}; ${this.teller.costOf(one)}`);
    });
  }

  // A button that follows a request.
  chooser(number) {
    const button = document.createElement("button");
    button.textContent = this.teller.name(number);
    button.addEventListener("click", () => this.choose(number));
    return button;
  }

  // Draws the shown step in the current size and colours; false: not drawn, because another step is shown by now.
  async redraw() {
    const call = ++this.shown;
    try {
      await this.film.loadBlocks(this.frame);
      if (call !== this.shown) return false;
      this.draw(this.film.stateAt(this.frame, this.step));
      return true;
    } catch (error) {
      this.stop();
      this.problem(`the film cannot be shown here: ${error.message}`);
      return false;
    }
  }

  async showPlace(place) {
    const { frame, step } = this.film.stepAt(Math.min(Math.max(place, 0), this.film.numSteps - 1));
    return this.show(frame, step);
  }

  // Shows a step by its id; the first one, if it is null or the film lacks this id.
  async showFrom(step) {
    const frame = step === null ? null : this.film.frameOfStep(step);
    return frame === null ? this.show(0) : this.show(frame, step);
  }

  // Shows a step by its id.
  async showStep(step) {
    const found = this.film.frameOfStep(step);
    if (found === null) return this.problem(`the film has no step ${step}`);
    this.problem(null);
    return this.show(found, step);
  }

  draw(state) {
    const at = this.film.frames[this.frame];
    const { step } = this;
    const time = seconds(this.film.timeOf(this.frame, step));
    const several = at.numSteps > 1 ? `, one of ${at.step} to ${at.step + at.numSteps - 1} that were done at once` : "";
    this.part("decidedTitle").textContent = `Decided for step ${step}, at ${time}${several}`;
    this.part("number").value = step;
    this.part("hand").style.left = `${this.line.shareOf(this.film.timeOf(this.frame, step)) * 100}%`;
    this.part("line").setAttribute("aria-valuenow", this.place);
    this.part("line").setAttribute("aria-valuetext", `step ${step}, ${time}`);
    const told = step === at.step ? this.teller.decided(this.frame) : [];
    if (!told.length) told.push(state.running.length ? "every running request decodes a token" : "nothing runs");
    if (this.place + 1 === this.film.numSteps) {
      for (const sentence of this.teller.sentences(this.film.eventsAfter())) told.push(`After it: ${sentence}`);
    }
    this.list("decided", told, (text) => item(text));
    this.drawCounters();
    this.drawLog();
    this.drawWaiting(state);
    this.drawRunning(state);
    this.drawBatch(state);
    this.drawFinished();
    this.drawPool(state);
    this.drawDiagram(state);
  }

  list(id, values, make) {
    const items = values.slice(0, MAX_ROWS).map(make);
    if (values.length > MAX_ROWS) items.push(item(`and ${thousands(values.length - MAX_ROWS)} more`));
    this.part(id).replaceChildren(...items);
  }

  entry(number, ...parts) {
    const button = document.createElement("button");
    button.append(span("name", this.teller.name(number)), " ", ...parts);
    button.addEventListener("click", () => this.choose(this.chosen === number ? null : number));
    const found = item(button);
    found.classList.toggle("chosen", number === this.chosen);
    button.setAttribute("aria-pressed", number === this.chosen);
    return found;
  }

  drawWaiting(state) {
    const asked = [...state.skipped, ...(state.blocker === null ? [] : [state.blocker])];
    const others = [...state.waiting, ...state.parked].filter((number) => !asked.includes(number));
    this.part("waitingTitle").textContent = `Waiting: ${thousands(state.waiting.length)}${state.parked.length ? `, parked: ${state.parked.length}` : ""}`;
    this.list("waiting", [...asked, ...others], (number) => {
      const one = state.requests.get(number);
      const times = one.numPreemptions ? `, preempted ${one.numPreemptions === 1 ? "once" : `${one.numPreemptions} times`}` : "";
      return this.entry(number, span("why", `${this.teller.why(state, number)}${times}`));
    });
  }

  drawRunning(state) {
    this.part("runningTitle").textContent = `Running: ${thousands(state.running.length)} of ${this.film.header.config.max_num_seqs}`;
    const knownOf = (number) => state.requests.get(number).prompt + state.requests.get(number).generated;
    const whole = state.running.reduce((most, number) => Math.max(most, knownOf(number)), 1);
    this.list("running", state.running, (number) => {
      const one = state.requests.get(number);
      const known = knownOf(number);
      const about = `${thousands(one.computed)} of ${thousands(known)} computed, ${thousands(one.generated)} generated`;
      return this.entry(number, span("why", about), bar(
        ["cached", one.cached / whole], ["computed", (one.computed - one.cached) / whole],
        ["lacking", (known - one.computed) / whole]));
    });
  }

  drawBatch(state) {
    const budget = this.film.header.config.max_num_batched_tokens;
    const total = state.batch.reduce((sum, row) => sum + row.tokens, 0);
    const prompts = state.batch.filter((row) => !row.samples || row.tokens > 1 + row.drafts);
    const isSingle = this.film.frames[this.frame].numSteps === 1;
    const prefill = isSingle ? this.counts.within("prefill", this.frame) : 0;
    const about = document.createElement("p");
    about.textContent = `${counted(total, "token")} of ${thousands(budget)}, in ${counted(state.batch.length, "row")}: ` +
      `${thousands(total - prefill)} decode, ${thousands(prefill)} prefill`;
    const rows = document.createElement("ol");
    rows.className = "requests";
    for (const row of [...prompts, ...state.batch.filter((one) => !prompts.includes(one))].slice(0, MAX_ROWS)) {
      const drafts = row.drafts ? `, ${row.drafts} of them drafts` : "";
      rows.append(this.entry(row.number, span("why", `${counted(row.tokens, "token")}${drafts}${row.samples ? "" : ", samples none"}`)));
    }
    this.part("batch").replaceChildren(about, bar(["decode", (total - prefill) / budget], ["prefill", prefill / budget]), rows);
  }

  // The most recently finished requests, newest first.
  drawFinished() {
    const { finishes } = this.counts;
    const total = firstOf(finishes, ({ frame }) => frame > this.frame);
    this.part("finishedTitle").textContent = `Finished: ${thousands(total)}`;
    const names = this.film.header.names.finish_reasons;
    const last = finishes.slice(Math.max(0, total - MAX_FINISHED), total).reverse();
    this.list("finished", last, ({ event }) =>
      this.entry(event.request, span("why", `${names[event.reason]}, ${counted(event.generated, "token")}`)));
    if (total > MAX_FINISHED) this.part("finished").append(item(`and ${thousands(total - MAX_FINISHED)} before`));
  }

  // ---------------------------------------------------------------------------------------------------- so far

  drawCounters() {
    const until = this.counts.at(this.frame, this.step);
    this.part("counters").replaceChildren(...COUNTERS.flatMap(([name, what]) => {
      const term = document.createElement("dt");
      const value = document.createElement("dd");
      term.textContent = what;
      value.textContent = thousands(until[name]);
      const both = document.createElement("div");
      both.append(term, value);
      return both;
    }));
  }

  drawLog() {
    const { frames } = this.film;
    this.list("log", this.teller.before(this.frame, this.step, MAX_OF_LOG), ([frame, text]) => {
      const button = document.createElement("button");
      button.textContent = `step ${frames[frame].step}`;
      button.addEventListener("click", () => { this.stop(); this.show(frame); });
      return item(button, text);
    });
  }

  // States and ladder, if they are open.
  drawDiagram(state) {
    if (!this.part("diagram").open) return;
    const numIn = { waiting: 0, parked: state.parked.length, running: state.running.length, preempted: 0 };
    for (const number of state.waiting) numIn[state.requests.get(number).status]++;
    const { finished, refused } = this.counts.at(this.frame, this.step);
    const isFirst = this.step === this.film.frames[this.frame].step;
    this.diagram.draw(this.counts, this.frame, isFirst, { ...numIn, finished, refused });
    this.part("ladder").replaceChildren(...ladderOf(this.film, this.counts, this.frame, this.step));
  }

  // ---------------------------------------------------------------------------------------------------- the pool

  drawPool(state) {
    const canvas = this.part("pool");
    if (state.references === null) {
      this.part("poolTitle").textContent = "KV pool: the film has no blocks";
      canvas.hidden = true;
      return;
    }
    const numBlocks = state.references.length;
    const reserved = this.film.header.config.num_reserved_blocks;
    const mine = new Set(this.chosen === null ? [] : state.requests.get(this.chosen)?.table ?? []);
    const perCell = Math.ceil(numBlocks / MAX_CELLS);
    const count = Math.ceil(numBlocks / perCell);
    const width = Math.max(1, canvas.clientWidth);
    const size = Math.max(3, Math.min(18, Math.floor(Math.sqrt((width * Math.max(90, width * 0.75)) / count))));
    const columns = Math.max(1, Math.floor(width / size));
    const { context } = this.canvasOf("pool", Math.ceil(count / columns) * size);
    this.cells = { columns, size, perCell, count };
    this.cell = Math.min(this.cell, count - 1);
    canvas.setAttribute("aria-valuemax", count - 1);
    canvas.setAttribute("aria-valuenow", this.cell);
    const totals = [0, 0, 0, 0]; // blocks that are blank, cached, owned, shared
    const cellsOf = ["--none", "--green", "--blue", "--purple", "--red"].map((name) => ({ name, cells: [] }));
    for (let cell = 0; cell < count; cell++) {
      const seen = [0, 0, 0, 0];
      let isMine = false;
      for (let block = Math.max(reserved, cell * perCell); block < Math.min(numBlocks, (cell + 1) * perCell); block++) {
        const references = state.references[block];
        seen[references > 1 ? 3 : references === 1 ? 2 : state.isCached[block]]++;
        isMine ||= mine.has(block);
      }
      let most = 0;
      for (let kind = 0; kind < 4; kind++) {
        totals[kind] += seen[kind];
        if (seen[kind] > seen[most]) most = kind;
      }
      cellsOf[isMine ? 4 : most].cells.push(cell);
    }
    for (const { name, cells } of cellsOf) {
      context.fillStyle = colour(name);
      for (const cell of cells) context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
    }
    const inUse = totals[2] + totals[3];
    const about = `${thousands(inUse)} of ${thousands(numBlocks - reserved)} blocks in use, ${thousands(totals[3])} shared, ` +
      `${thousands(totals[1])} free with cached content`;
    this.part("poolTitle").textContent = `KV pool: ${about}`;
    canvas.setAttribute("aria-label", `KV pool, ${about}; the arrow keys go from block to block`);
    if (document.activeElement === canvas) this.sayCell(this.cell);
  }

  hover(event) {
    if (this.cells === null || this.film === null || !this.film.hasBlocks) return;
    const box = this.part("pool").getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cells.size);
    const cell = Math.floor((event.clientY - box.top) / this.cells.size) * this.cells.columns + column;
    const isOn = column < this.cells.columns && cell >= 0 && cell < this.cells.count;
    this.part("block").textContent = isOn ? this.aboutCell(cell) : "";
  }

  moveCell(event) {
    if (this.cells === null || this.film === null || !this.film.hasBlocks) return;
    const { columns, count } = this.cells;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation(); // the page's own arrows go from step to step
    if (this.cell + by >= 0 && this.cell + by < count) this.cell += by;
    this.redraw();
  }

  // The cell with the keyboard focus: its frame, and its content.
  sayCell(cell) {
    const { columns, size } = this.cells;
    const context = this.part("pool").getContext("2d");
    context.strokeStyle = colour("--ink");
    context.lineWidth = 2;
    context.strokeRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
    this.part("block").textContent = this.aboutCell(cell);
    this.part("pool").setAttribute("aria-valuetext", this.part("block").textContent);
  }

  aboutCell(cell) {
    const state = this.film.stateAt(this.frame, this.step);
    const first = cell * this.cells.perCell;
    if (this.cells.perCell > 1) {
      const last = Math.min(state.references.length, first + this.cells.perCell) - 1;
      const used = state.references.slice(first, last + 1).filter((one) => one > 0).length;
      return `blocks ${first} to ${last}: ${used} in use`;
    }
    const size = this.film.header.config.block_size;
    const owners = state.running.flatMap((number) => {
      const place = state.requests.get(number).table.indexOf(first);
      return place < 0 ? [] : [`${this.teller.name(number)} (tokens ${place * size} to ${(place + 1) * size - 1})`];
    });
    const references = state.references[first];
    const what = references ? `${counted(references, "reference")}: ${owners.join(", ") || "a transfer"}`
      : first < this.film.header.config.num_reserved_blocks ? "reserved" : state.isCached[first] ? "free, with cached content" : "blank";
    return `block ${first}: ${what}`;
  }

  // ---------------------------------------------------------------------------------------------------- one request

  choose(number, redraw = true) {
    this.chosen = number === null || number < 0 ? null : number;
    this.part("life").hidden = this.chosen === null;
    if (this.chosen !== null) {
      const life = this.teller.life(this.chosen);
      this.part("lifeTitle").textContent = `The life of ${this.teller.name(this.chosen)}`;
      this.part("waited").textContent = `It ran ${seconds(life.ran)} and waited ${seconds(life.total)}${life.total ? ":" : "."}`;
      this.list("reasons", [...life.waited], ([why, time]) => item(span("name", `${seconds(time)} ${words(why)}`), span("why", `: ${meaningOf(why)}`)));
      this.list("moments", life.moments, ([time, text, frame]) => {
        const button = document.createElement("button");
        button.textContent = seconds(time);
        button.addEventListener("click", () => { this.stop(); this.show(frame); });
        return item(button, text);
      });
    }
    if (this.line !== null) this.drawLine();
    this.onChoose(this);
    if (redraw) this.show(this.frame, this.step);
  }

  find(text) {
    const exact = this.film.requests.findIndex((one) => one.id === text);
    const found = exact >= 0 ? exact : this.film.requests.findIndex((one) => one.id.includes(text));
    if (found < 0) this.problem(`no request is called ${text}`);
    else {
      this.problem(null);
      this.choose(found);
    }
  }

  // ---------------------------------------------------------------------------------------------------- playing

  play() {
    if (this.timer !== null) return this.stop();
    this.part("play").textContent = "⏸ Pause";
    const speed = () => Number(this.part("speed").value);
    const wait = () => 1000 / Math.min(speed(), MAX_DRAWS);
    const mine = ++this.plays;
    let due = performance.now() + wait(); // of the next step; drawing time is part of it
    const next = async () => {
      if (this.place + 1 >= this.film.numSteps) return this.stop();
      await this.showPlace(this.place + Math.max(1, Math.round(speed() / MAX_DRAWS)));
      due = Math.max(due + wait(), performance.now());
      if (this.timer !== null && mine === this.plays) this.timer = setTimeout(next, due - performance.now());
    };
    this.timer = setTimeout(next, wait());
    return undefined;
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.part("play").textContent = "▶ Play";
  }

  // Handles a key of the page; true: it was a key of the view.
  handleKey(event) {
    if (this.film === null || event.ctrlKey || event.metaKey || event.altKey) return false;
    const typing = ["INPUT", "SELECT", "TEXTAREA", "SUMMARY"].includes(event.target.tagName);
    if (event.key === "Escape") {
      event.target.blur?.();
      this.choose(null);
      return true;
    }
    if (typing) return false;
    const by = event.shiftKey ? 10 : 1;
    const actions = {
      ArrowRight: () => this.showPlace(this.place + by), ArrowLeft: () => this.showPlace(this.place - by),
      Home: () => this.showPlace(0), End: () => this.showPlace(this.film.numSteps - 1), "/": () => this.part("find").focus(),
      p: () => this.toPreemption(1), P: () => this.toPreemption(-1),
      " ": () => (event.target.tagName === "BUTTON" ? null : this.play()),
    };
    const action = actions[event.key];
    if (action === undefined || (event.key === " " && event.target.tagName === "BUTTON")) return false;
    event.preventDefault();
    if (event.key !== " ") this.stop();
    action();
    return true;
  }
}
