"""vLLM 0.31 to 0.33, V1 scheduler: running requests first, in one list, then waiting ones (seeds 002 and 003).

Beside the descriptions: what a preempted request was granted in this step goes to those behind the row that asks; if
the row that asks is itself the victim the walk ends in 0.32, and goes on in 0.33; the queue of "priority" is sorted by
priority and arrival, and has no front for the preempted. Watermark, long-prefill threshold and lookahead are off, as by
default.
"""

from __future__ import annotations

from .sequences import Decision, Sequence, Specification


class Vllm(Specification):
    stops_behind_itself = False

    def schedule(self) -> Decision:
        decision = Decision()
        granted: dict[Sequence, int] = {}
        budget = self._run(granted, decision)
        for sequence, num_tokens in granted.items():
            self.compute(sequence, num_tokens, decision)
        if not decision.preempted:
            self._admit(budget, decision)
        return decision

    def _run(self, granted: dict[Sequence, int], decision: Decision) -> int:
        budget = self.settings.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            num_tokens = min(len(sequence.tokens) - sequence.computed, budget)
            while self.cache.missing(sequence, sequence.computed + num_tokens) > self.cache.free:
                victim = self._victim()
                if self.running.index(victim) < index:
                    index -= 1
                self.running.remove(victim)
                budget += granted.pop(victim, 0)
                self.preempt(victim, decision)
                if victim is sequence:
                    break
            if sequence not in self.running:
                if self.stops_behind_itself:
                    return budget
                continue
            self.cache.grow(sequence, sequence.computed + num_tokens)
            granted[sequence] = num_tokens
            budget -= num_tokens
            index += 1
        return budget

    def _victim(self) -> Sequence:
        if self.settings.by_priority:
            return max(self.running, key=lambda sequence: (sequence.priority, sequence.arrival))
        return self.running[-1]

    def _head(self) -> Sequence:
        if self.settings.by_priority:
            return min(self.waiting, key=lambda sequence: (sequence.priority, sequence.arrival))
        return self.waiting[0]

    def _admit(self, budget: int, decision: Decision) -> None:
        cache = self.cache
        while self.waiting and budget > 0 and len(self.running) < self.settings.max_num_seqs:
            sequence = self._head()
            cached = cache.look_up(sequence)
            hit = len(cached) * cache.size
            num_tokens = min(len(sequence.tokens) - hit, budget)
            # The whole sequence must fit; a cached block costs a free one unless a sequence holds it.
            held = sum(block.references > 0 for block in cached)
            if cache.blocks_for(len(sequence.tokens)) - held > cache.free:
                break
            cache.start(sequence, cached, hit + num_tokens)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            decision.cached[sequence.name] = hit
            self.compute(sequence, num_tokens, decision)
            budget -= num_tokens


class Vllm032(Vllm):
    stops_behind_itself = True
