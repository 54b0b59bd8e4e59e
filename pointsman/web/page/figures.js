// How two runs differ: what each request waited for its first token and took in all, the figures of a whole run, settings.

"use strict";

const MOST_GAINS = 8; // requests that gained most, and as many that lost most

class Figures {
  constructor(film, counts) {
    this.film = film;
    this.counts = counts;
    this.numbers = new Map(film.requests.map((one, number) => [one.id, number])); // of an id used twice, the last
    this.ttft = film.requests.map((one, number) => counts.firstToken[number] - one.arrival); // seconds; NaN: no token in the film
    this.e2e = new Array(film.requests.length).fill(NaN);
    for (const { event } of counts.finishes) this.e2e[event.request] = event.time - film.requests[event.request].arrival;
    for (const number of film.beginning().requests.keys()) this.e2e[number] = NaN; // it came before the film begins
  }

  // [name, value, how it is written], of the whole run.
  rows() {
    const { film, counts } = this;
    const last = film.frames.length - 1;
    const total = (name) => counts[name][last];
    const ttft = this.ttft.filter((one) => !Number.isNaN(one));
    const e2e = this.e2e.filter((one) => !Number.isNaN(one));
    const gaps = [...counts.itl].filter((one) => one > 0);
    const span = film.end - film.frames[0].time;
    return [
      ["requests finished", this.e2e.filter((one) => !Number.isNaN(one)).length, whole],
      ["steps", film.numSteps, whole],
      ["seconds", span, seconds],
      ["tokens scheduled for decoding, a second", span > 0 ? total("decode") / span : NaN, (one) => one.toFixed(1)],
      ["TTFT, mean", mean(ttft), seconds],
      ["TTFT, 99th percentile", percentile(ttft, 0.99), seconds],
      ["end to end, mean", mean(e2e), seconds],
      ["end to end, 99th percentile", percentile(e2e, 0.99), seconds],
      ["longest gap between tokens of a step, 99th percentile", percentile(gaps, 0.99), seconds],
      ["preemptions", total("preempted"), whole],
      ["tokens prefilled", total("prefill"), whole],
      ["tokens found in the cache", total("cached"), whole],
    ];
  }
}

const whole = (value) => thousands(Math.round(value));
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;

// Linear between the values, as NumPy's.
function percentile(values, share) {
  if (!values.length) return NaN;
  const sorted = [...values].sort((one, other) => one - other);
  const place = share * (sorted.length - 1);
  const low = Math.floor(place);
  return sorted[low] + (place - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
}

// "+12 %" of the first value.
function change(one, other) {
  if (Number.isNaN(one) || Number.isNaN(other)) return "";
  if (one === other) return "the same";
  if (one === 0) return "";
  const share = (100 * (other - one)) / one;
  return `${share > 0 ? "+" : "−"}${Math.abs(share) < 10 ? Math.abs(share).toFixed(1) : whole(Math.abs(share))} %`;
}

// [name, of the first, of the second] of every setting that differs.
function differences(one, other) {
  const found = [];
  for (const name of new Set([...Object.keys(one.header.config), ...Object.keys(other.header.config)])) {
    const values = [one, other].map((film) => JSON.stringify(film.header.config[name]) ?? "not there");
    if (values[0] !== values[1]) found.push([name, ...values]);
  }
  return found;
}

// Of the requests that finished in both: those whose end came sooner in the second one, and those whose came later.
function gains(one, other) {
  const both = [];
  for (const [id, number] of one.numbers) {
    const there = other.numbers.get(id);
    if (there === undefined) continue;
    const by = other.e2e[there] - one.e2e[number];
    if (!Number.isNaN(by)) both.push({ id, by, ttft: [one.ttft[number], other.ttft[there]], e2e: [one.e2e[number], other.e2e[there]] });
  }
  both.sort((first, second) => first.by - second.by);
  const sooner = both.filter((each) => each.by < 0);
  const later = both.filter((each) => each.by > 0).reverse();
  return { count: both.length, numSooner: sooner.length, numLater: later.length,
    most: [...sooner.slice(0, MOST_GAINS), ...later.slice(0, MOST_GAINS)] };
}
