// The page that plays a film: what it shows comes from film.js, what it says from story.js.

"use strict";

const MOST_ROWS = 200; // requests that a list names
const MOST_CELLS = 4096; // blocks that have a cell of their own; of more, a cell stands for several
const MOST_IDS = 2000; // ids that are offered while one is typed

const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seconds = (time) => `${time.toFixed(3)} s`;

let film = null;
let teller = null;
let curves = null;
let frame = 0;
let chosen = null; // the number of a request
let timer = null;
let shown = 0; // counts calls of show: a slower one of before is dropped

// ------------------------------------------------------------------------------------------------------ opening

async function open(buffer, name) {
  stop();
  try {
    const opened = await Film.read(buffer);
    film = opened;
  } catch (error) {
    problem(error instanceof FilmError ? `${name}: ${error.message}` : `${name} cannot be shown: ${error.message}`);
    return;
  }
  problem(null);
  teller = new Teller(film);
  curves = curvesOf(film);
  chosen = null;
  frame = 0;
  $("title").textContent = document.title = name;
  const whole = film.isComplete ? "" : "; it was cut off";
  const { config } = film.header;
  const last = film.frames.at(-1);
  $("about").textContent =
    `${thousands(film.requests.length)} requests, ${thousands(last.step + last.numSteps - film.frames[0].step)} steps, ` +
    `${film.end.toFixed(1)} s; ${thousands(config.num_blocks)} blocks of ${config.block_size} tokens, a budget of ` +
    `${thousands(config.max_num_batched_tokens)} tokens, ${config.max_num_seqs} sequences, order ${config.order}${whole}`;
  $("ids").replaceChildren(...film.requests.slice(0, MOST_IDS).map((one) => Object.assign(document.createElement("option"), { value: one.id })));
  $("number").max = last.step + last.numSteps - 1;
  $("number").min = film.frames[0].step;
  $("line").setAttribute("aria-valuemax", film.frames.length - 1);
  $("player").hidden = false;
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("request")) choose(film.requests.findIndex((one) => one.id === wanted.get("request")), false);
  const step = wanted.has("step") ? film.frameOfStep(Number(wanted.get("step"))) : null;
  drawLine();
  await show(step ?? 0);
}

function problem(text) {
  $("problem").hidden = text === null;
  $("problem").textContent = text ?? "";
}

// What each frame had: of all of them at once, for the time line.
function curvesOf(of) {
  const found = { running: [], waiting: [], used: [], preempted: [] };
  const { num_blocks: numBlocks, num_reserved_blocks: numReserved } = of.header.config;
  const key = of.chunks[0].events;
  const running = new Set(key.key_running);
  const waiting = new Set(key.key_waiting);
  let preempted = 0;
  for (const event of of.allEvents()) {
    switch (event.op) {
      case "queued": case "rolled_back": case "preempted":
        running.delete(event.request);
        waiting.add(event.request);
        preempted += event.op === "preempted" ? 1 : 0;
        break;
      case "parked": case "finished":
        running.delete(event.request);
        waiting.delete(event.request);
        break;
      case "admitted":
        waiting.delete(event.request);
        running.add(event.request);
        break;
      case "step": case "steps":
        found.running.push(running.size);
        found.waiting.push(waiting.size);
        found.used.push(1 - event.free / (numBlocks - numReserved));
        found.preempted.push(preempted);
        preempted = 0;
        break;
    }
  }
  return found;
}

// ------------------------------------------------------------------------------------------------------ the time line

function canvasOf(id, height) {
  const canvas = $(id);
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}

// Where a frame is on the line, 0 to 1: by its time.
const placeOf = (index) => (film.end > 0 ? film.frames[index].time / film.end : 0);

function drawLine() {
  const { context, width, height } = canvasOf("line", 110);
  const low = height - 12;
  const most = (values) => values.reduce((high, one) => Math.max(high, one), 1);
  const lines = [
    ["KV pool in use", curves.used, 1, "--sky", true],
    ["waiting", curves.waiting, most(curves.waiting), "--orange", false],
    ["running", curves.running, most(curves.running), "--blue", false],
  ];
  context.clearRect(0, 0, width, height);
  for (const [, values, high, name, filled] of lines) {
    context.beginPath();
    if (filled) context.moveTo(0, low);
    let before = null;
    values.forEach((value, index) => {
      const x = placeOf(index) * width;
      const y = low - (value / high) * (low - 6);
      if (before !== null) context.lineTo(x, before);
      context.lineTo(x, y);
      before = y;
    });
    context.lineTo(width, before);
    if (filled) {
      context.lineTo(width, low);
      context.globalAlpha = 0.35;
      context.fillStyle = colour(name);
      context.fill();
      context.globalAlpha = 1;
    } else {
      context.strokeStyle = colour(name);
      context.lineWidth = 1.5;
      context.stroke();
    }
  }
  context.fillStyle = colour("--red");
  curves.preempted.forEach((count, index) => {
    if (!count) return;
    const x = placeOf(index) * width;
    context.beginPath();
    context.moveTo(x - 4, height);
    context.lineTo(x + 4, height);
    context.lineTo(x, height - 8);
    context.fill();
  });
  const total = curves.preempted.reduce((sum, one) => sum + one, 0);
  $("lineLegend").replaceChildren(
    ...lines.flatMap(([name, , high, of]) => [swatch(of), ` ${name}, up to ${of === "--sky" ? "100 %" : thousands(high)} `]),
    swatch("--red"), ` ${counted(total, "preemption")}`
  );
}

function swatch(name) {
  const found = document.createElement("i");
  found.style.background = `var(${name})`;
  return found;
}

function scrub(event) {
  const box = $("line").getBoundingClientRect();
  const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  show(film.frameAt(share * film.end));
}

// ------------------------------------------------------------------------------------------------------ a frame

async function show(index) {
  frame = Math.min(Math.max(index, 0), film.frames.length - 1);
  const call = ++shown;
  try {
    await film.loadBlocks(frame);
    if (call !== shown) return;
    draw(film.stateAt(frame));
  } catch (error) {
    stop();
    problem(`the film cannot be shown here: ${error.message}`);
  }
}

function draw(state) {
  const at = film.frames[frame];
  const several = at.numSteps > 1 ? ` to ${at.step + at.numSteps - 1}, done at once` : "";
  $("decidedTitle").textContent = `Decided for ${at.numSteps > 1 ? "steps" : "step"} ${at.step}${several}, at ${seconds(at.time)}`;
  $("number").value = at.step;
  $("hand").style.left = `${placeOf(frame) * 100}%`;
  $("line").setAttribute("aria-valuenow", frame);
  $("line").setAttribute("aria-valuetext", `step ${at.step}, ${seconds(at.time)}`);
  const told = teller.decided(frame);
  const steady = `every running request decodes a token${at.numSteps > 1 ? " in each step" : ""}`;
  list("decided", told.length ? told : [state.running.length ? steady : "nothing runs"], (text) => item(text));
  drawWaiting(state);
  drawRunning(state);
  drawBatch(state);
  drawFinished();
  drawPool(state);
  const where = new URLSearchParams({ step: at.step });
  if (chosen !== null) where.set("request", film.requests[chosen].id);
  history.replaceState(null, "", `#${where}`);
}

function item(...parts) {
  const found = document.createElement("li");
  found.append(...parts);
  return found;
}

function list(id, values, make) {
  const items = values.slice(0, MOST_ROWS).map(make);
  if (values.length > MOST_ROWS) items.push(item(`and ${thousands(values.length - MOST_ROWS)} more`));
  $(id).replaceChildren(...items);
}

function entry(number, ...parts) {
  const button = document.createElement("button");
  button.append(span("name", teller.name(number)), " ", ...parts);
  button.addEventListener("click", () => choose(chosen === number ? null : number));
  const found = item(button);
  found.classList.toggle("chosen", number === chosen);
  button.setAttribute("aria-pressed", number === chosen);
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

function drawWaiting(state) {
  const asked = [...state.skipped, ...(state.blocker === null ? [] : [state.blocker])];
  const others = [...state.waiting, ...state.parked].filter((number) => !asked.includes(number));
  $("waitingTitle").textContent = `Waiting: ${thousands(state.waiting.length)}${state.parked.length ? `, parked: ${state.parked.length}` : ""}`;
  list("waiting", [...asked, ...others], (number) => {
    const one = state.requests.get(number);
    const times = one.numPreemptions ? `, preempted ${one.numPreemptions === 1 ? "once" : `${one.numPreemptions} times`}` : "";
    return entry(number, span("why", `${teller.why(state, number)}${times}`));
  });
}

function drawRunning(state) {
  $("runningTitle").textContent = `Running: ${thousands(state.running.length)} of ${film.header.config.max_num_seqs}`;
  const knownOf = (number) => state.requests.get(number).prompt + state.requests.get(number).generated;
  const whole = state.running.reduce((most, number) => Math.max(most, knownOf(number)), 1);
  list("running", state.running, (number) => {
    const one = state.requests.get(number);
    const known = knownOf(number);
    const about = `${thousands(one.computed)} of ${thousands(known)} computed, ${thousands(one.generated)} generated`;
    return entry(number, span("why", about), bar(
      ["cached", one.cached / whole], ["computed", (one.computed - one.cached) / whole],
      ["lacking", (known - one.computed) / whole]));
  });
}

function drawBatch(state) {
  const budget = film.header.config.max_num_batched_tokens;
  const total = state.batch.reduce((sum, row) => sum + row.tokens, 0);
  const prompts = state.batch.filter((row) => !row.samples || row.tokens > 1 + row.drafts);
  const prefill = prompts.reduce((sum, row) => sum + row.tokens, 0);
  const about = document.createElement("p");
  about.textContent = `${counted(total, "token")} of ${thousands(budget)}, in ${counted(state.batch.length, "row")}: ` +
    `${thousands(total - prefill)} decode, ${thousands(prefill)} prefill`;
  const rows = document.createElement("ol");
  rows.className = "requests";
  for (const row of [...prompts, ...state.batch.filter((one) => !prompts.includes(one))].slice(0, MOST_ROWS)) {
    const drafts = row.drafts ? `, ${row.drafts} of them drafts` : "";
    rows.append(entry(row.number, span("why", `${counted(row.tokens, "token")}${drafts}${row.samples ? "" : ", samples none"}`)));
  }
  $("batch").replaceChildren(about, bar(["decode", (total - prefill) / budget], ["prefill", prefill / budget]), rows);
}

// The requests that finished last, newest first.
function drawFinished() {
  const found = [];
  let total = 0;
  const end = film.frames[frame];
  for (const [index, chunk] of film.chunks.entries()) {
    if (index > end.chunk) break;
    const events = index === end.chunk ? chunk.list.slice(0, end.event + 1) : chunk.list;
    for (const event of events) {
      if (event.op !== "finished") continue;
      total++;
      found.push(event);
      if (found.length > 2 * MOST_ROWS) found.splice(0, MOST_ROWS);
    }
  }
  $("finishedTitle").textContent = `Finished: ${thousands(total)}`;
  const names = film.header.names.finish_reasons;
  list("finished", found.reverse(), (event) =>
    entry(event.request, span("why", `${names[event.reason]}, ${counted(event.generated, "token")}`)));
}

// ------------------------------------------------------------------------------------------------------ the pool

let cells = null; // {columns, size, perCell}

function drawPool(state) {
  const canvas = $("pool");
  if (state.references === null) {
    $("poolTitle").textContent = "KV pool: the film has no blocks";
    canvas.hidden = true;
    return;
  }
  const numBlocks = state.references.length;
  const reserved = film.header.config.num_reserved_blocks;
  const mine = new Set(chosen === null ? [] : state.requests.get(chosen)?.table ?? []);
  const perCell = Math.ceil(numBlocks / MOST_CELLS);
  const count = Math.ceil(numBlocks / perCell);
  const width = Math.max(1, canvas.clientWidth);
  const size = Math.max(3, Math.min(18, Math.floor(Math.sqrt((width * Math.max(90, width * 0.45)) / count))));
  const columns = Math.max(1, Math.floor(width / size));
  const { context } = canvasOf("pool", Math.ceil(count / columns) * size);
  cells = { columns, size, perCell, count };
  const colours = ["--none", "--green", "--blue", "--purple", "--red"].map(colour);
  const totals = [0, 0, 0, 0];
  const kind = (block) => {
    const references = state.references[block];
    return references > 1 ? 3 : references === 1 ? 2 : state.isCached[block] ? 1 : 0;
  };
  for (let cell = 0; cell < count; cell++) {
    const seen = [0, 0, 0, 0];
    let isMine = false;
    for (let block = cell * perCell; block < Math.min(numBlocks, (cell + 1) * perCell); block++) {
      if (block < reserved) continue;
      seen[kind(block)]++;
      isMine ||= mine.has(block);
    }
    seen.forEach((one, index) => (totals[index] += one));
    const most = isMine ? 4 : seen.indexOf(Math.max(...seen));
    context.fillStyle = colours[most];
    context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
  }
  const inUse = totals[2] + totals[3];
  const about = `${thousands(inUse)} of ${thousands(numBlocks - reserved)} blocks in use, ${thousands(totals[3])} shared, ` +
    `${thousands(totals[1])} free with cached content`;
  $("poolTitle").textContent = `KV pool: ${about}`;
  canvas.setAttribute("aria-label", about);
}

function hover(event) {
  if (cells === null || film === null || !film.hasBlocks) return;
  const box = $("pool").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / cells.size);
  const cell = Math.floor((event.clientY - box.top) / cells.size) * cells.columns + column;
  if (column >= cells.columns || cell < 0 || cell >= cells.count) {
    $("block").textContent = "";
    return;
  }
  const state = film.stateAt(frame);
  const first = cell * cells.perCell;
  if (cells.perCell > 1) {
    const last = Math.min(state.references.length, first + cells.perCell) - 1;
    const used = state.references.slice(first, last + 1).filter((one) => one > 0).length;
    $("block").textContent = `blocks ${first} to ${last}: ${used} in use`;
    return;
  }
  const size = film.header.config.block_size;
  const owners = state.running.flatMap((number) => {
    const place = state.requests.get(number).table.indexOf(first);
    return place < 0 ? [] : [`${teller.name(number)} (tokens ${place * size} to ${(place + 1) * size - 1})`];
  });
  const references = state.references[first];
  const what = references ? `${counted(references, "reference")}: ${owners.join(", ") || "a transfer"}`
    : first < film.header.config.num_reserved_blocks ? "reserved" : state.isCached[first] ? "free, with cached content" : "blank";
  $("block").textContent = `block ${first}: ${what}`;
}

// ------------------------------------------------------------------------------------------------------ one request

function choose(number, redraw = true) {
  chosen = number === null || number < 0 ? null : number;
  $("life").hidden = chosen === null;
  if (chosen !== null) {
    const life = teller.life(chosen);
    const total = [...life.waited.values()].reduce((sum, one) => sum + one, 0);
    const reasons = [...life.waited].sort((one, other) => other[1] - one[1]).map(([why, time]) => `${words(why)} ${seconds(time)}`);
    $("lifeTitle").textContent = `The life of ${teller.name(chosen)}`;
    $("waited").textContent = `It ran ${seconds(life.ran)} and waited ${seconds(total)}${reasons.length ? `: ${reasons.join("; ")}` : ""}.`;
    list("moments", life.moments, ([time, text]) => {
      const button = document.createElement("button");
      button.textContent = seconds(time);
      button.addEventListener("click", () => show(film.frameAt(time)));
      return item(button, text);
    });
  }
  if (redraw) show(frame);
}

function find(text) {
  const exact = film.requests.findIndex((one) => one.id === text);
  const found = exact >= 0 ? exact : film.requests.findIndex((one) => one.id.includes(text));
  if (found < 0) problem(`no request is called ${text}`);
  else {
    problem(null);
    choose(found);
  }
}

// ------------------------------------------------------------------------------------------------------ playing

function play() {
  if (timer !== null) return stop();
  $("play").textContent = "⏸ Pause";
  const wait = () => 1000 / Number($("speed").value);
  const next = async () => {
    if (frame + 1 >= film.frames.length) return stop();
    await show(frame + 1);
    if (timer !== null) timer = setTimeout(next, wait());
  };
  timer = setTimeout(next, wait());
  return undefined;
}

function stop() {
  clearTimeout(timer);
  timer = null;
  $("play").textContent = "▶ Play";
}

function pressed(event) {
  if (film === null || event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "Escape") {
    event.target.blur?.();
    choose(null);
    return;
  }
  if (typing) return;
  const by = event.shiftKey ? 10 : 1;
  const actions = {
    ArrowRight: () => show(frame + by), ArrowLeft: () => show(frame - by), Home: () => show(0),
    End: () => show(film.frames.length - 1), "/": () => $("find").focus(),
    " ": () => (event.target.tagName === "BUTTON" ? null : play()),
  };
  const action = actions[event.key];
  if (action === undefined || (event.key === " " && event.target.tagName === "BUTTON")) return;
  event.preventDefault();
  if (event.key !== " ") stop();
  action();
}

// ------------------------------------------------------------------------------------------------------ the page

function begin() {
  $("reset").addEventListener("click", () => { stop(); show(0); });
  $("back").addEventListener("click", () => { stop(); show(frame - 1); });
  $("step").addEventListener("click", () => { stop(); show(frame + 1); });
  $("play").addEventListener("click", play);
  $("number").addEventListener("change", () => {
    const found = film.frameOfStep(Number($("number").value));
    if (found === null) problem(`the film has no step ${$("number").value}`);
    else { problem(null); show(found); }
  });
  $("find").addEventListener("change", () => $("find").value && find($("find").value));
  $("line").addEventListener("pointerdown", (event) => { stop(); $("line").setPointerCapture(event.pointerId); scrub(event); });
  $("line").addEventListener("pointermove", (event) => event.buttons && scrub(event));
  $("pool").addEventListener("pointermove", hover);
  document.addEventListener("keydown", pressed);
  window.addEventListener("resize", () => { if (film !== null) { drawLine(); show(frame); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (film !== null) { drawLine(); show(frame); } });
  const take = async (file) => file && open(await file.arrayBuffer(), file.name);
  $("file").addEventListener("change", () => take($("file").files[0]));
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("drop"); });
  document.addEventListener("dragleave", () => document.body.classList.remove("drop"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("drop");
    take(event.dataTransfer.files[0]);
  });
  const carried = $("film");
  if (carried !== null) {
    const text = atob(carried.textContent.trim());
    const bytes = new Uint8Array(text.length);
    for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
    $("open").hidden = true;
    open(bytes.buffer, $("title").textContent);
  }
}

begin();
