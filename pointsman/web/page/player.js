// The page that plays a film: an embedded one, or one that is opened or dropped on it. A second film is compared with
// the first: moving one moves the other, to the same time or the same step.

"use strict";

const REMEMBER_EACH = 400; // milliseconds
const MAX_ALONE = 5; // maximum number of ids listed of requests that finished in one run only
const RANKED = { e2e: "finished sooner", ttft: "had their first token sooner", perToken: "had less time between tokens" };
const MAX_BYTES = 256 * 2 ** 20; // maximum size of a film: a browser holds all of it

const panes = [{ root: "first", name: "" }, { root: "second", name: "" }]; // each gets a view
const following = new Map(); // views that follow the other one, with the number of pending moves

const other = (view) => panes.find((pane) => pane.view && pane.view !== view && pane.view.film !== null)?.view;

function shown(view) {
  if (!following.get(view)) {
    remember(view);
    const second = other(view);
    if (second !== undefined) follow(second, view);
  }
}

// A link contains the step and the request of the first film; the second film follows. Browsers allow few changes of it
// a second.
let remembered = -Infinity;
let toRemember = null;

function remember(view) {
  if (view !== panes[0].view) return;
  clearTimeout(toRemember);
  toRemember = setTimeout(() => writeLink(view), Math.max(0, remembered + REMEMBER_EACH - performance.now()));
}

function writeLink(view) {
  remembered = performance.now();
  const where = new URLSearchParams({ step: view.step });
  if (view.chosen !== null) where.set("request", view.film.requests[view.chosen].id);
  if (other(view) !== undefined) where.set("by", $("by").value);
  history.replaceState(null, "", `#${where}`);
}

async function follow(view, leader) {
  view.stop(); // the other one leads
  following.set(view, (following.get(view) ?? 0) + 1);
  try {
    await view.showPlace($("by").value === "step" ? leader.place : view.film.placeAt(leader.film.timeOf(leader.frame, leader.step)));
  } finally {
    following.set(view, following.get(view) - 1);
  }
  remember(panes[0].view);
}

// The number of one view's chosen request in the other view; -1: missing there.
function sameIn(view, second) {
  const figuresOf = (one) => panes.find((pane) => pane.view === one).figures;
  const [mine, theirs] = [figuresOf(view), figuresOf(second)];
  return mine && theirs ? theirs.numbers.get(mine.keys[view.chosen]) ?? -1 : -1;
}

let isChoosing = false;

function chosen(view) {
  const second = other(view);
  if (second === undefined || isChoosing) return;
  isChoosing = true;
  const id = view.chosen === null ? null : view.film.requests[view.chosen].id;
  second.choose(id === null ? null : sameIn(view, second), false);
  isChoosing = false;
}

async function open(pane, buffer, name) {
  const wanted = new URLSearchParams(location.hash.slice(1));
  pane.view ??= new View($(pane.root), { onProblem: problem, onShow: shown, onChoose: chosen });
  if (!(await pane.view.open(buffer, name))) return false;
  pane.name = name;
  pane.figures = null;
  const both = panes.every((each) => each.view && each.view.film !== null);
  $("title").textContent = document.title = both ? `${panes[0].name} and ${panes[1].name}` : name;
  $("player").hidden = $("beside").hidden = false;
  $("secondPane").hidden = $("firstName").hidden = $("comparison").hidden = !both;
  $("player").classList.toggle("pair", both);
  $("firstName").textContent = panes[0].name;
  $("secondName").textContent = panes[1].name;
  if (["time", "step"].includes(wanted.get("by"))) $("by").value = wanted.get("by");
  if (both) compare();
  for (const each of panes) if (each.view && each.view.film !== null) each.view.drawLine();
  const { view } = panes[0];
  if (wanted.has("request")) view.choose(view.film.requests.findIndex((one) => one.id === wanted.get("request")), false);
  await view.showFrom(wanted.has("step") ? Number(wanted.get("step")) : null);
  return true;
}

// ------------------------------------------------------------------------------------------------------ comparing

function compare() {
  const [one, two] = panes.map((pane) => (pane.figures = new Figures(pane.view.film, pane.view.counts)));
  const differ = differences(one.film, two.film);
  const cut = panes.filter((pane) => !pane.view.film.isComplete).map((pane) => `${pane.name} was cut off. `).join("");
  $("settings").textContent = cut + (differ.length
    ? `Settings that differ: ${differ.map(([name, before, after]) => `${name} ${before} and ${after}`).join("; ")}.`
    : "Both have the same settings.");
  const others = two.rows();
  $("figures").replaceChildren(tableRow("th", "", panes[0].name, panes[1].name, "change"), ...one.rows().map(([name, value, write], index) => {
    const second = others[index][1];
    const text = (number) => (Number.isNaN(number) ? "none" : write(number));
    return tableRow("td", name, text(value), text(second), change(value, second));
  }));
  rank();
}

// The requests with the largest gains and losses, by the chosen time.
function rank() {
  const [one, two] = panes.map((pane) => pane.figures);
  const by = $("rank").value;
  const found = gains(one, two, by);
  $("gained").textContent = found.count === 0 ? "No request finished in both."
    : `Of ${counted(found.count, "request")} that finished in both, ${thousands(found.numSooner)} ${RANKED[by]} in ` +
      `“${panes[1].name}”, and ${thousands(found.numLater)} in “${panes[0].name}”${found.most.length ? "; the largest gains and losses:" : "."}`;
  $("alone").textContent = found.alone.map((ids, index) => {
    const more = ids.length > MAX_ALONE ? `, and ${thousands(ids.length - MAX_ALONE)} more` : "";
    return ids.length ? `Finished only in “${panes[index].name}”: ${ids.slice(0, MAX_ALONE).join(", ")}${more}. ` : "";
  }).join("");
  $("gains").hidden = !found.most.length;
  const pair = (values) => values.map((value) => (Number.isNaN(value) ? "none" : value.toFixed(3))).join(" → ");
  $("gains").replaceChildren(tableRow("th", "request", "TTFT, s", "per token, s", "end to end, s"), ...found.most.map((each) => {
    const button = document.createElement("button");
    button.textContent = each.id;
    button.addEventListener("click", () => panes[0].view.choose(each.number));
    return tableRow("td", button, pair(each.ttft), pair(each.perToken), pair(each.e2e));
  }));
}

// ------------------------------------------------------------------------------------------------------ the page

async function take(pane, file) {
  if (!file) return;
  if (file.size > MAX_BYTES) {
    problem(`${file.name} has ${thousands(file.size)} bytes, and a page shows at most ${thousands(MAX_BYTES)}; leave out its ` +
      "blocks (pointsman film --no-blocks), or record a shorter run");
    return;
  }
  await open(pane, await file.arrayBuffer(), file.name);
}

async function begin() {
  document.addEventListener("keydown", (event) => {
    const pane = panes.find((each) => each.view && $(each.root).contains(event.target)) ?? panes[0];
    pane.view?.handleKey(event);
  });
  $("file").addEventListener("change", () => take(panes[0], $("file").files[0]));
  $("other").addEventListener("change", () => take(panes[1], $("other").files[0]));
  $("by").addEventListener("change", () => shown(panes[0].view));
  $("rank").addEventListener("change", rank);
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("drop"); });
  document.addEventListener("dragleave", () => document.body.classList.remove("drop"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("drop");
    const isFirst = !panes[0].view || panes[0].view.film === null;
    take(panes[isFirst ? 0 : 1], event.dataTransfer.files[0]);
  });
  const carried = $("film");
  if (carried === null) return;
  $("open").hidden = true;
  const names = JSON.parse(new TextDecoder().decode(carriedBytes($("names"))));
  await open(panes[0], carriedBytes(carried), names[0]);
  if ($("film2") !== null) await open(panes[1], carriedBytes($("film2")), names[1]);
}

begin();
