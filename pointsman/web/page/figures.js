// Compares two runs: the times of each request (first token, end to end), the figures of the whole runs, and the
// settings.

"use strict";

const MAX_GAINS = 8; // number of requests with the largest gains, and with the largest losses

const NOT_DONE = new Set(["abort", "refused", "error", "deadline"]); // reasons to finish without a completion

class Figures {
  constructor(film, counts) {
    this.film = film;
    this.counts = counts;
    const times = new Map();
    this.keys = film.requests.map(({ id }) => { // an id may be reused once its request has finished
      times.set(id, (times.get(id) ?? 0) + 1);
      return JSON.stringify([id, times.get(id)]);
    });
    this.numbers = new Map(this.keys.map((key, number) => [key, number]));
    const nothing = () => new Array(film.requests.length).fill(NaN);
    this.ttft = film.requests.map((one, number) => counts.firstToken[number] - one.arrival); // seconds; NaN: no token in the film
    this.e2e = nothing();
    this.perToken = nothing(); // seconds between two tokens, on average
    this.numUndone = 0;
    const names = film.header.names.finish_reasons;
    const begun = film.beginning().requests; // arrived before the film
    for (const { event: { request: number, reason, time } } of counts.finishes) {
      if (NOT_DONE.has(names[reason])) this.numUndone++;
      else if (!begun.has(number)) {
        this.e2e[number] = time - film.requests[number].arrival;
        const span = counts.lastToken[number] - counts.firstToken[number];
        if (counts.tokens[number] > 1) this.perToken[number] = span / (counts.tokens[number] - 1);
      }
    }
  }

  // [name, value, how it is written], for the whole run.
  rows() {
    const { film, counts } = this;
    const last = film.frames.length - 1;
    const total = (name) => counts[name][last];
    const known = (values) => values.filter((one) => !Number.isNaN(one));
    const [ttft, e2e, perToken] = [this.ttft, this.e2e, this.perToken].map(known);
    const gaps = counts.longestGap.filter((one) => one > 0);
    const span = film.end - film.frames[0].time;
    return [
      ["requests finished", e2e.length, whole],
      ["requests aborted, refused, failed or late", this.numUndone, whole],
      ["steps", film.numSteps, whole],
      ["seconds", span, seconds],
      ["tokens generated, a second", span > 0 ? counts.generated / span : NaN, (one) => one.toFixed(1)],
      ["TTFT, mean", mean(ttft), seconds],
      ["TTFT, 99th percentile", percentile(ttft, 0.99), seconds],
      ["end to end, mean", mean(e2e), seconds],
      ["end to end, 99th percentile", percentile(e2e, 0.99), seconds],
      ["time per output token, mean of requests", mean(perToken), seconds],
      ["longest gap between tokens of a request, 99th percentile", percentile(gaps, 0.99), seconds],
      ["preemptions", total("preempted"), whole],
      ["tokens prefilled", total("prefill"), whole],
      ["tokens found in the cache", total("cached"), whole],
    ];
  }
}

const whole = (value) => thousands(Math.round(value));
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;

// Linear interpolation, as in NumPy.
function percentile(values, share) {
  if (!values.length) return NaN;
  const sorted = [...values].sort((one, other) => one - other);
  const place = share * (sorted.length - 1);
  const low = Math.floor(place);
  return sorted[low] + (place - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
}

// The change in percent of the first value, such as "+12 %".
function change(one, other) {
  if (Number.isNaN(one) || Number.isNaN(other)) return "";
  if (one === other) return "the same";
  if (one === 0) return "";
  const share = (100 * (other - one)) / one;
  return `${share > 0 ? "+" : "−"}${Math.abs(share) < 10 ? Math.abs(share).toFixed(1) : whole(Math.abs(share))} %`;
}

// [name, first value, second value] of every setting that differs.
function differences(one, other) {
  const found = [];
  for (const name of new Set([...Object.keys(one.header.config), ...Object.keys(other.header.config)])) {
    const values = [one, other].map((film) => JSON.stringify(film.header.config[name]) ?? "not there");
    if (values[0] !== values[1]) found.push([name, ...values]);
  }
  return found;
}

// Of the requests that finished in both runs: those whose time (ttft, perToken or e2e) is shorter in the second run,
// and those whose time is longer. Also the requests that finished in only one run.
function gains(one, other, by) {
  const both = [];
  const alone = [[], []];
  const hasEnded = (figures, number) => number !== undefined && !Number.isNaN(figures.e2e[number]);
  for (const [key, number] of one.numbers) {
    const there = other.numbers.get(key);
    const { id } = one.film.requests[number];
    if (!hasEnded(one, number)) continue;
    if (!hasEnded(other, there)) alone[0].push(id);
    else {
      const pair = (name) => [one[name][number], other[name][there]];
      const [before, after] = pair(by);
      both.push({ number, id, by: after - before, ttft: pair("ttft"), perToken: pair("perToken"), e2e: pair("e2e") });
    }
  }
  for (const [key, there] of other.numbers) {
    if (hasEnded(other, there) && !hasEnded(one, one.numbers.get(key))) alone[1].push(other.film.requests[there].id);
  }
  const known = both.filter((each) => !Number.isNaN(each.by)).sort((first, second) => first.by - second.by);
  const sooner = known.filter((each) => each.by < 0);
  const later = known.filter((each) => each.by > 0).reverse();
  return { count: both.length, alone, numSooner: sooner.length, numLater: later.length,
    most: [...sooner.slice(0, MAX_GAINS), ...later.slice(0, MAX_GAINS)] };
}
