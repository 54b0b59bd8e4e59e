// A film in words, as pointsman/web/story.py puts it: what was decided in a step, and the life of one request.

"use strict";

const CAUSES = {
  parked: "the host parked it",
  reset: "the prefix cache was reset, and what runs is computed again",
  unsampled: "no token came for it from a step that samples",
};
const CHOICES = {
  latest: "was admitted last of those that run",
  "lowest-priority": "is the least urgent of those that run",
  "least-cost": "costs least to compute again, of those that free enough",
};
const RECOVERIES = ["", ", and what is evicted of it is computed again", ", and what is evicted of it is swapped"];
// What is short, or null, and the words: as CAUSES in pointsman/core/observe/explain.py.
const REASONS = {
  watermark: ["KV blocks", "the KV blocks left are headroom for what runs (watermark)"],
  full_sequence: ["KV blocks", "its whole sequence does not fit beside what partial prefills are owed"],
  decode_reserve: ["KV blocks", "the output that is expected of it would not fit"],
  reserve: ["KV blocks", "the KV blocks left are kept for what runs, by a reserve"],
  bypass: ["KV blocks", "the KV blocks released are kept for a request before it"],
  step_time: [null, "it would make the step longer than its target time"],
  blocks: ["KV blocks", "the KV cache is full"],
  sequence_limit: ["sequence slots", "all sequence slots are taken"],
  budget: ["tokens of the step's budget", "the step is full"],
  preemption: [null, "running requests ran out of KV blocks; a step that preempts admits no request"],
  displacement: [null, "a more urgent request is admitted alone into what was preempted for it"],
  static_batch: [null, "the static batch still runs"],
  adapter_slots: ["adapter slots", "other adapters hold them, or a request that waited longer has claimed the next"],
  prefill_first: [null, "prompts go before decoding, and the step is theirs"],
  partial_prefills: ["places", "as many prefills as allowed are partial"],
  encoder_budget: ["embeddings", "the step's budget for its encoder inputs is spent"],
  encoder_cache: ["embeddings", "others hold the encoder cache"],
  paused: [null, "the scheduler is paused"],
  in_flight: ["samples", "steps in flight sample for it, and what they sample has to come back first"],
  kv_connector: [null, "the connector has yet to say what KV it could load"],
  kv_room: ["KV blocks", "the blocks that transfers may own are taken, and it is next"],
  kv_load: [null, "its KV is being loaded"],
  behind: [null, "it is not its turn"],
  parked: [null, "it is parked"],
  state: [null, "the state behind its cached prefix is computed in this step"],
};

const words = (name) => name.replaceAll("_", " ");
const thousands = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");
const counted = (count, what) => `${thousands(count)} ${what}${count === 1 ? "" : "s"}`;

// "3 more KV blocks", "1 more KV block"
const lacking = (missing, resource) => `${thousands(missing)} more ${missing === 1 ? resource.replace(/s\b/, "") : resource}`;

// A reason for waiting, as the keys of a life's `waited` have it, in words.
function meaningOf(reason) {
  const [first, blocked] = reason.split(", ");
  if (first === BEHIND) return blocked ? `it was not its turn; of the first in the queue: ${meaningOf(blocked)}` : "it was not its turn";
  return REASONS[reason]?.[1] ?? words(reason);
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
        const reason = names.reasons[event.reason];
        const resource = REASONS[reason]?.[0];
        const lacks = event.missing && resource ? ` for ${lacking(event.missing, resource)}` : "";
        const holder = event.holder ? `; ${this.name(event.holder - 1)} holds most` : "";
        return `${who} waits${lacks}: ${meaningOf(reason)}${holder}`;
      }
      case "admitted": {
        const cached = event.cached ? `, ${counted(event.cached, "token")} of it cached` : "";
        return `${who} ${event.resumed ? "resumes" : "starts"}${cached}`;
      }
      case "preempted": {
        const { lost, cached } = event;
        const share = !cached ? "none" : cached === lost ? "all" : thousands(cached);
        const kept = lost ? `, ${share} of it still cached then` : "";
        return `${who} is preempted: ${this.causeOf(event)}; it gives up the KV of ${counted(lost, "token")}${kept}${RECOVERIES[event.recovery]}`;
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

  // Whose need a preemption was, and why it is this request.
  causeOf(event) {
    const cause = this.names.causes[event.cause];
    if (!event.by) return CAUSES[cause] ?? cause;
    const by = event.by - 1;
    if (!event.missing) return `${this.name(by)} is more urgent and takes its place`;
    const isOwn = by === event.request;
    const need = event.missing === 1 ? `${isOwn ? "it needs a block itself" : `${this.name(by)} needs a block`}, and none is free`
      : `${thousands(event.missing)} blocks are missing, the first of them for ${isOwn ? "itself" : this.name(by)}`;
    return `${need}; ${this.name(event.request)} ${CHOICES[event.chooser] ?? `is the choice of the policy ${event.chooser}`}`;
  }

  // What a preemption cost, of those in `counts.preemptions`.
  costOf({ resumedAfter, recomputed }) {
    return resumedAfter === null ? "it did not resume"
      : `it resumed after ${resumedAfter.toFixed(3)} s, with ${counted(recomputed, "token")} to compute again`;
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

  // What happened to a request, with the frame that each moment led to; how long it ran and waited, and why.
  life(number) {
    const moments = [];
    let lost = 0;
    for (const { event, frame } of this.counts.ofRequest[number]) {
      let told = this.sentence(event);
      if (event.op === "preempted") lost = event.lost;
      else if (event.op === "admitted" && lost) told += `, ${counted(Math.max(0, lost - event.cached), "token")} to compute again`;
      if (told !== null) moments.push([event.time, told, frame]);
    }
    return { moments, ...this.counts.lifeOf(number) };
  }
}

if (typeof module !== "undefined") module.exports = { Teller };
