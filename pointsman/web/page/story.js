// A film in words, as pointsman/web/story.py puts it: what was decided in a step, and the life of one request.

"use strict";

const CAUSES = {
  memory: "no block was free for a running request",
  displaced: "a more urgent request takes its place",
  parked: "the host parked it",
  reset: "the prefix cache was reset, and what runs is computed again",
  unsampled: "no token came for it from a step that samples",
};
const BEHIND = "behind others";

const words = (name) => name.replaceAll("_", " ");
const thousands = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");
const counted = (count, what) => `${thousands(count)} ${what}${count === 1 ? "" : "s"}`;

class Teller {
  constructor(film, counts = new Counts(film)) {
    this.film = film;
    this.counts = counts;
    this.names = film.header.names;
  }

  name(number) {
    return this.film.requests[number].id;
  }

  // What happened; null: a step, or nothing worth a sentence.
  sentence(event) {
    const names = this.names;
    if (event.request === null) {
      if (event.op === "failed") return `${counted(event.steps, "step")} failed and will be decided again`;
      if (event.op === "paused") return ["resumed", "paused: nobody is admitted", "paused"][event.mode];
      if (event.op === "limited") {
        return event.limit ? `at most ${event.limit - 1} requests run` : "no limit of active requests";
      }
      return null;
    }
    const who = this.name(event.request);
    const request = this.film.requests[event.request];
    switch (event.op) {
      case "added": {
        const tenant = !request.tenant ? "" : ` of tenant ${request.tenant}`;
        return `${who} is added${tenant}: ${counted(request.promptTokens, "prompt token")}`;
      }
      case "refused":
        return `${who} is refused: ${event.why}`;
      case "parked":
        return `${who} is parked: ${words(names.statuses[event.status])}`;
      case "deferred": {
        const missing = event.missing ? `, ${event.missing} missing` : "";
        const holder = event.holder ? `; ${this.name(event.holder - 1)} holds most` : "";
        return `${who} waits: ${words(names.reasons[event.reason])}${missing}${holder}`;
      }
      case "admitted": {
        const cached = event.cached ? `, ${counted(event.cached, "token")} of it cached` : "";
        return `${who} ${event.resumed ? "resumes" : "starts"}${cached}`;
      }
      case "preempted": {
        const recovery = ["", ", to be computed again", ", to be swapped"][event.recovery];
        const lost = `it loses ${counted(event.lost, "token")}, ${event.cached} of them still cached`;
        return `${who} is preempted: ${CAUSES[names.causes[event.cause]]}; ${lost}${recovery}`;
      }
      case "rolled_back":
        return `${who} waits again, since its step failed`;
      case "finished": {
        const detail = event.detail ? ` (${event.detail})` : "";
        const why = names.finish_reasons[event.reason];
        return `${who} finishes: ${why}${detail}, ${counted(event.generated, "token")} generated`;
      }
      case "priority":
        return `${who} gets priority ${event.priority}`;
      case "extended":
        return `${who} has ${counted(event.prompt, "prompt token")} now`;
      case "load_started":
        return `${who} loads ${counted(event.tokens, "token")}`;
      case "load_finished":
        return `${who} ${event.failed ? "lacks some of what it loads" : "has loaded"}: ${counted(event.tokens, "token")}`;
      default:
        return null;
    }
  }

  decided(frame) {
    return this.sentences(this.film.eventsOf(frame));
  }

  sentences(events) {
    return events.map((event) => this.sentence(event)).filter((told) => told !== null);
  }

  // What was decided before a step, the newest first: at most so many sentences, each with its frame.
  before(frame, step, most) {
    const found = [];
    for (const one of this.counts.toldBefore(step > this.film.frames[frame].step ? frame + 1 : frame)) {
      for (const told of this.decided(one).reverse()) found.push([one, told]);
      if (found.length >= most) break;
    }
    return found.slice(0, most);
  }

  // Why a request that does not run waits.
  why(state, number) {
    const one = state.requests.get(number);
    if (number === state.blocker || state.skipped.includes(number)) {
      const holder = one.holder === null ? "" : `, most of it held by ${this.name(one.holder)}`;
      return words(one.reason ?? one.status) + holder;
    }
    if (state.parked.includes(number)) return words(one.status);
    return state.blocker === null ? "not asked yet" : `behind ${this.name(state.blocker)}`;
  }

  // Everything about a request, with the frame that each moment led to; how long it waited, and why: behind others, what
  // these lacked.
  life(number) {
    const { reasons } = this.names;
    const { frames, end } = this.film;
    const moments = [];
    const waited = new Map();
    let ran = 0;
    const begin = this.film.beginning();
    const there = begin.requests.get(number);
    let since = begin.time;
    let reason = "";
    let blocked = ""; // the queue, by what its first request lacked
    let passed = 0; // frames
    if (there !== undefined) {
      if (begin.running.includes(number)) reason = "running";
      else reason = there.reason ?? (begin.parked.includes(number) ? there.status : BEHIND);
    }
    const count = (until) => {
      if (reason === "running") ran += until - since;
      else if (reason && until !== since) {
        const name = reason === BEHIND && blocked ? `${BEHIND}, ${blocked}` : reason;
        waited.set(name, (waited.get(name) ?? 0) + until - since);
      }
      since = until;
    };
    const wait = (until, frame) => {
      for (; passed < frame; passed++) {
        if (reason === BEHIND) count(frames[passed].time);
        const by = passed + 1 === frame || reason === BEHIND ? this.film.eventOf(passed).blocked : 0;
        blocked = by ? reasons[by - 1] : "";
      }
      count(until);
    };
    for (const { event, frame } of this.counts.ofRequest[number]) {
      wait(event.time, frame);
      const told = this.sentence(event);
      if (told !== null) moments.push([event.time, told, frame]);
      if (["queued", "preempted", "rolled_back"].includes(event.op)) reason = BEHIND;
      else if (event.op === "parked") reason = this.names.statuses[event.status];
      else if (event.op === "deferred") reason = reasons[event.reason];
      else if (event.op === "admitted") reason = "running";
      else if (event.op === "finished" || event.op === "refused") reason = "";
    }
    wait(end, frames.length);
    return { moments, waited, ran };
  }
}

if (typeof module !== "undefined") module.exports = { Teller };
