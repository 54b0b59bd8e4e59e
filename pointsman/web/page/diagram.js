// The states of a request as a diagram, and the responses to memory pressure as a ladder: number of requests in each
// state, moves in this step, and moves so far.

"use strict";

const SVG = "http://www.w3.org/2000/svg";
const STATE_SIZE = { width: 96, height: 38 };
// The centre of each state, in a picture of 360 by 364.
const STATES = {
  new: [180, 24], refused: [304, 24], parked: [56, 118], waiting: [180, 118], running: [180, 222], preempted: [304, 222],
  finished: [180, 336],
};
// From, to, and the path of the arrow.
const MOVES = [
  ["new", "waiting", "M180 43 V99"],
  ["new", "parked", "M150 43 L82 99"],
  ["new", "refused", "M228 24 H256"],
  ["waiting", "refused", "M212 99 L284 43"],
  ["waiting", "parked", "M132 112 H104"],
  ["parked", "waiting", "M104 124 H132"],
  ["waiting", "running", "M172 137 V203"],
  ["running", "waiting", "M188 203 V137"],
  ["running", "parked", "M144 203 L78 137"],
  ["running", "preempted", "M228 216 H256"],
  ["preempted", "running", "M256 228 H228"],
  ["preempted", "parked", "M280 203 C262 160 130 185 70 137"],
  ["parked", "preempted", "M58 137 C118 200 262 175 292 203"],
  ["running", "finished", "M180 241 V317"],
  ["waiting", "finished", "M228 122 C252 150 246 300 218 317"],
  ["preempted", "finished", "M304 241 C304 300 270 330 228 336"],
  ["parked", "finished", "M44 137 C44 290 90 336 132 336"],
];
const RUNGS = [
  ["evicted", "Evict", "cached blocks that no request uses lose their content", "block", "blocks"],
  ["waited", "Wait", "waiting requests are not admitted, since memory is short", "step", "steps"],
  ["outOfMemory", "Preempt", "a running request releases its blocks, and waits", "preemption", "preemptions"],
  ["refused", "Refuse", "a request that cannot be served is refused, for any reason", "request", "requests"],
];

let numDiagrams = 0;

function drawn(name, attributes, ...parts) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...parts);
  return found;
}

class Diagram {
  // root: gets the picture; says: the element for the text of the move under the pointer.
  constructor(root, says) {
    const id = ++numDiagrams;
    this.says = says;
    this.default = "";
    this.numbers = new Map();
    this.picture = drawn("svg", { viewBox: "0 0 360 364", role: "group" });
    const arrow = (kind) => drawn("marker", { id: `${kind}-${id}`, class: kind, viewBox: "0 0 8 8", refX: 7, refY: 4,
      markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, drawn("path", { d: "M0 0 L8 4 L0 8 Z" }));
    this.picture.append(drawn("defs", {}, arrow("arrow"), arrow("lit")));
    this.moves = MOVES.map(([from, to, path]) => {
      const line = drawn("path", { class: "line", d: path });
      const group = drawn("g", { class: "move", tabindex: 0, role: "img" }, drawn("path", { class: "hit", d: path }), line);
      const tell = () => (this.says.textContent = group.getAttribute("aria-label"));
      const forget = () => (this.says.textContent = this.default);
      for (const event of ["pointerenter", "focus"]) group.addEventListener(event, tell);
      for (const event of ["pointerleave", "blur"]) group.addEventListener(event, forget);
      this.picture.append(group);
      return { from, to, trigger: WORDS.moves[`${from} ${to}`], group, line, arrows: [`url(#arrow-${id})`, `url(#lit-${id})`] };
    });
    const { width, height } = STATE_SIZE;
    for (const [name, [x, y]] of Object.entries(STATES)) {
      const number = drawn("text", { x, y: y + 13, class: "number" });
      this.picture.append(drawn("g", { class: `state ${name}`, "aria-hidden": "true" },
        drawn("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 6 }), drawn("text", { x, y: y - 3 }, name), number));
      this.numbers.set(name, number);
    }
    root.replaceChildren(this.picture);
  }

  // isFirst: the step is the first of its frame; all events that led to the frame led to it.
  draw(counts, frame, isFirst, numIn) {
    for (const [name, number] of this.numbers) number.textContent = name in numIn ? thousands(numIn[name]) : "";
    const states = Object.entries(numIn).map(([name, number]) => `${thousands(number)} ${name}`).join(", ");
    this.picture.setAttribute("aria-label", `States of a request: ${states}`);
    const happened = [];
    for (const { from, to, trigger, group, line, arrows } of this.moves) {
      const { now, until } = counts.taken(from, to, frame);
      const isLit = isFirst && now > 0;
      const times = `${counted(until, "time")} so far${isLit ? `, ${thousands(now)} in this step` : ""}`;
      group.setAttribute("aria-label", `${from} → ${to}: ${trigger}; ${times}`);
      group.setAttribute("class", `move ${isLit ? "lit" : until ? "taken" : "never"}`);
      line.setAttribute("marker-end", arrows[isLit ? 1 : 0]);
      if (isLit) happened.push(`${from} → ${to} ${now > 1 ? `${thousands(now)} times` : "once"}`);
    }
    this.default = happened.length ? `In this step: ${happened.join("; ")}.` : "In this step no request changes its state.";
    const pointedAt = this.moves.find(({ group }) => group.matches(":hover, :focus"));
    this.says.textContent = pointedAt?.group.getAttribute("aria-label") ?? this.default;
  }
}

// The rungs, each with its count in this step, and so far.
function ladderOf(film, counts, frame, step) {
  const { step: first, numSteps } = film.frames[frame];
  const until = counts.at(frame, step);
  const event = film.eventOf(frame);
  const now = Object.fromEntries(RUNGS.map(([name]) => [name, step === first ? counts.within(name, frame) : 0]));
  const isBlocked = counts.within("waited", frame) > 0;
  const run = numSteps > 1 ? ` in steps ${first} to ${first + numSteps - 1}` : "";
  const why = event.blocked ? words(film.header.names.reasons[event.blocked - 1]) : "";
  now.evicted = event.evicted;
  return RUNGS.map(([name, title, what, one, several]) => {
    const isLit = name === "waited" ? isBlocked : now[name] > 0;
    const rung = span("rung", "");
    const number = (count) => `${thousands(count)} ${count === 1 ? one : several}`;
    const answered = name === "waited" ? `now, reason: ${why}` : `now: ${number(now[name])}${name === "evicted" ? run : ""}`;
    const far = name === "evicted" && run ? `${number(until[name])} until the last of these` : `${number(until[name])} so far`;
    rung.append(span("name", title), " ", span("why", what), span("figures", `${isLit ? `${answered}; ` : ""}${far}`));
    const found = item(rung);
    found.classList.toggle("lit", isLit);
    return found;
  });
}

if (typeof module !== "undefined") module.exports = { MOVES };
