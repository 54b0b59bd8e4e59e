// Prints the page reader's view of films: a line of JSON for each line of JSON on stdin, {film, steps, requests}.
// steps: [frame, step], or [frame, null] for the state after all its steps. Its argument: the words of pages.

"use strict";

const fs = require("fs");
const path = require("path");
const page = path.join(__dirname, "..", "..", "pointsman", "web", "page");
globalThis.WORDS = JSON.parse(process.argv[2]); // a page has all of it in one script
const { Film, firstOf } = require(path.join(page, "film.js"));
const { BEHIND, Counts, PLACES } = require(path.join(page, "counts.js"));
const { MOVES } = require(path.join(page, "diagram.js"));
const { Teller } = require(path.join(page, "story.js"));

Object.assign(globalThis, { firstOf, BEHIND });

async function answer({ film: file, steps, requests }) {
  const bytes = fs.readFileSync(file);
  let film;
  try {
    film = await Film.read(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  } catch (error) {
    return { error: `${error.name}: ${error.message}` };
  }
  const counts = grown(film, 1);
  const teller = new Teller(film, counts);
  const states = [];
  for (const [frame, step] of steps) {
    await film.loadBlocks(frame);
    const state = film.stateAt(frame, step);
    const place = step === null ? null : film.placeOf(frame, step);
    states.push({
      time: state.time,
      ways: step === null ? null : [place, film.stepAt(place), film.frameOfStep(step), film.timeOf(frame, step), film.placeAt(film.timeOf(frame, step))],
      running: state.running.map((number) => {
        const one = state.requests.get(number);
        return [number, one.computed, one.generated, one.prompt, one.cached, one.numPreemptions, [...one.table]];
      }),
      waiting: state.waiting.map((number) => [number, teller.why(state, number)]),
      parked: state.parked.map((number) => [number, teller.why(state, number)]),
      batch: state.batch.map((row) => [row.number, row.tokens, row.samples, row.drafts]),
      references: state.references && [...state.references],
      cached: state.isCached && [...state.isCached].flatMap((one, block) => (one && !state.references[block] ? [block] : [])),
      decided: teller.decided(frame),
      counts: step === null ? null : counts.at(frame, step),
      places: step === null ? null : placesAt(counts, frame),
      before: step === null ? null : teller.before(frame, step, 12),
    });
  }
  const lives = requests.map((number) => {
    const life = teller.life(number);
    return [life.moments, Object.fromEntries(life.waited), life.ran];
  });
  const curves = Object.fromEntries(["running", "waiting", "used"].map((name) => [name, [...counts[name]]]));
  const itl = [...counts.itl];
  const numFrames = film.frames.filter((frame) => frame.chunk > 1).length;
  const gap = grown(film, 1, 1);
  const behindGap = [gap.running, gap.waiting].map((values) => (numFrames ? values.slice(-numFrames) : []));
  const drawn = new Set(MOVES.map(([from, to]) => `${from} ${to}`));
  const notDrawn = [...counts.moves.keys()].filter((move) => !drawn.has(move));
  return { curves, itl, behindGap, notDrawn, after: teller.sentences(film.eventsAfter()), frames: film.frames.map((one) => [one.step, one.numSteps, one.time]), end: film.end, states, lives };
}

// Counts that get the first chunks first, and then the others without the missing ones.
function grown(film, first, missing = 0) {
  const { chunks } = film;
  film.chunks = chunks.slice(0, first);
  const counts = new Counts(film);
  film.chunks = [...film.chunks, ...chunks.slice(first + missing)];
  counts.grow();
  film.chunks = chunks;
  return counts;
}

// The number of requests that each state gained in the moves up to a frame.
function placesAt(counts, frame) {
  const found = Object.fromEntries(PLACES.map((place) => [place, 0]));
  for (const key of counts.moves.keys()) {
    const [from, to] = key.split(" ");
    const { until } = counts.taken(from, to, frame);
    found[from] -= until;
    found[to] += until;
  }
  return found;
}

(async () => {
  for (const line of fs.readFileSync(0, "utf8").split("\n").filter(Boolean)) {
    console.log(JSON.stringify(await answer(JSON.parse(line))));
  }
})();
