// Tells a film in words, like pointsman/web/story.py: the decisions of a step, and the life of one request. The words
// are in WORDS, which pointsman/web/words.py makes and pointsman/web/page.py puts before the scripts.

"use strict";

const words = (name) => name.replaceAll("_", " ");
const thousands = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");
const counted = (count, what) => `${thousands(count)} ${what}${count === 1 ? "" : "s"}`;

// The sentence of a template of WORDS, as `fill` in pointsman/web/words.py, which describes templates.
function fill(template, values) {
  if (Array.isArray(template)) {
    const [by, templates] = template;
    template = templates[Math.min(Number(values[by]), templates.length - 1)];
  }
  const isGiven = (option) => [...option.matchAll(/\{(\w+)/g)].every(([, name]) => values[name]);
  return template.replace(/\[([^\]]*)\]/g, (_, option) => (isGiven(option) ? option : ""))
    .replace(/\{(\w+)(?::([^}]+))?\}/g, (_, name, kind) =>
      (kind === undefined ? values[name] : kind === "," ? thousands(values[name]) : counted(values[name], kind)));
}

function lacking(missing, resource) {
  return fill(WORDS.lacking, { missing, resource: resource[missing === 1 ? 0 : 1] });
}

// A reason for waiting (a key of a life's `waited`), in words.
function meaningOf(reason) {
  const [first, blocked] = reason.split(", ");
  if (first === BEHIND) return fill(WORDS.notItsTurn, { first: blocked ? meaningOf(blocked) : "" });
  return WORDS.reasons[reason]?.text ?? words(reason);
}

class Teller {
  constructor(film, counts = new Counts(film)) {
    this.film = film;
    this.counts = counts;
    this.names = film.header.names;
  }

  name(number) {
    return this.film.requests[number].id;
  }

  // The sentence of an event; null: a step, or an event without a sentence.
  sentence(event) {
    const template = WORDS.sentences[event.op];
    return template === undefined ? null : fill(template, this.valuesOf(event));
  }

  // The values for the sentence of an event.
  valuesOf(event) {
    if (event.request === null) return { ...event, num_active: event.limit - 1 };
    const { names } = this;
    const request = this.film.requests[event.request];
    const values = { ...event, request: request.id };
    switch (event.op) {
      case "added":
        return { ...values, tenant: request.tenant, num_prompt_tokens: request.promptTokens };
      case "parked":
        return { ...values, why: words(names.statuses[event.status]) };
      case "deferred": {
        const reason = names.reasons[event.reason];
        const resource = WORDS.reasons[reason]?.resource;
        return {
          ...values,
          why: meaningOf(reason),
          lacks: event.missing && resource ? lacking(event.missing, resource) : "",
          holder: event.holder ? this.name(event.holder - 1) : "",
        };
      }
      case "preempted": {
        const { lost, cached } = event;
        const share = !cached ? WORDS.shares.none : cached === lost ? WORDS.shares.all : thousands(cached);
        return { ...values, why: this.causeOf(event), share: lost ? share : "", recovery: WORDS.recoveries[event.recovery] };
      }
      case "finished":
        return { ...values, why: names.finish_reasons[event.reason] };
      default:
        return values;
    }
  }

  // The request whose need caused a preemption, and why this victim was chosen.
  causeOf(event) {
    const cause = this.names.causes[event.cause];
    if (!event.by) return WORDS.preemptions[cause] ?? cause;
    const by = event.by - 1;
    const need = event.missing ? WORDS.needs[by === event.request ? "own" : "other"] : WORDS.moreUrgent;
    return fill(need, {
      request: this.name(event.request),
      by: this.name(by),
      missing: event.missing,
      several: event.missing > 1,
      rule: WORDS.rules[event.chooser] ?? fill(WORDS.otherRule, event),
    });
  }

  // The cost of a preemption in `counts.preemptions`.
  costOf({ resumedAfter, recomputed }) {
    return resumedAfter === null ? WORDS.costs.open
      : fill(WORDS.costs.resumed, { seconds: resumedAfter.toFixed(3), num_again: recomputed });
  }

  decided(frame) {
    return this.sentences(this.film.eventsOf(frame));
  }

  sentences(events) {
    return events.map((event) => this.sentence(event)).filter((told) => told !== null);
  }

  // The decisions before a step, newest first: at most `most` sentences, each with its frame.
  before(frame, step, most) {
    const found = [];
    for (const one of this.counts.framesBefore(step > this.film.frames[frame].step ? frame + 1 : frame)) {
      for (const told of this.decided(one).reverse()) found.push([one, told]);
      if (found.length >= most) break;
    }
    return found.slice(0, most);
  }

  // Why a request that does not run is waiting.
  why(state, number) {
    const one = state.requests.get(number);
    if (number === state.blocker || state.skipped.includes(number)) {
      const holder = one.holder === null ? "" : this.name(one.holder);
      return fill(WORDS.waits.asked, { why: words(one.reason ?? one.status), holder });
    }
    if (state.parked.includes(number)) return words(one.status);
    return state.blocker === null ? WORDS.waits.first : fill(WORDS.waits.behind, { blocker: this.name(state.blocker) });
  }

  // The events of a request, each with the frame that it led to; how long it ran and waited, and why.
  life(number) {
    const moments = [];
    let lost = 0;
    for (const { event, frame } of this.counts.ofRequest[number]) {
      let told = this.sentence(event);
      if (event.op === "preempted") lost = event.lost;
      else if (event.op === "admitted" && lost) told += fill(WORDS.again, { num_again: Math.max(0, lost - event.cached) });
      if (told !== null) moments.push([event.time, told, frame]);
    }
    return { moments, ...this.counts.lifeOf(number) };
  }
}

if (typeof module !== "undefined") module.exports = { Teller };
