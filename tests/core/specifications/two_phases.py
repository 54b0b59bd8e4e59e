"""nano-vLLM (seed 004, and its later code) and miniVLLM (seed 001): a step is for prompts or for decoding.

One thing is added to each: a preempted sequence that has outgrown the token budget, which the originals never admit
again, is computed over several steps, as the later nano-vLLM does with any long prompt. It can only be the first of a
step, and goes on first in the next.
"""

from __future__ import annotations

from .sequences import Block, Decision, Sequence, Specification


class TwoPhases(Specification):
    def schedule(self) -> Decision:
        decision = Decision()
        self._prefill(decision)
        if not decision.tokens:
            self._decode(decision)
        return decision

    def _prefill(self, decision: Decision) -> None:
        cache, left = self.cache, self.settings.max_num_batched_tokens
        for sequence in self.running:
            if sequence.is_cut:
                num_tokens = min(len(sequence.tokens) - sequence.computed, left)
                self.compute(sequence, num_tokens, decision)
                left -= num_tokens
        while self.waiting and left > 0 and len(decision.tokens) < self.settings.max_num_seqs:
            sequence = self.waiting[0]
            cached = cache.look_up(sequence)
            if not self._has_blocks(sequence, cached):
                break
            if self._size(sequence, cached) > left and not self._may_be_cut(sequence, left):
                break
            cache.start(sequence, cached, len(sequence.tokens))  # all its blocks at once
            self.running.append(self.waiting.pop(0))
            decision.cached[sequence.name] = sequence.computed
            num_tokens = min(len(sequence.tokens) - sequence.computed, left)
            left -= self._charge(sequence, num_tokens, left)
            self.compute(sequence, num_tokens, decision)

    def _may_be_cut(self, sequence: Sequence, left: int) -> bool:
        return left == self.settings.max_num_batched_tokens

    def _has_blocks(self, sequence: Sequence, cached: list[Block]) -> bool:
        return self.cache.free >= self.cache.blocks_for(len(sequence.tokens))

    def _size(self, sequence: Sequence, cached: list[Block]) -> int:
        """What is compared with the rest of the budget."""
        return len(sequence.tokens)

    def _charge(self, sequence: Sequence, num_tokens: int, left: int) -> int:
        return num_tokens

    def _decode(self, decision: Decision) -> None:
        scheduled: list[Sequence] = []
        while self.running and len(scheduled) < self.settings.max_num_seqs:
            sequence = self.running.pop(0)
            while self.cache.missing(sequence, len(sequence.tokens)) > self.cache.free:
                victim = self.running.pop() if self.running else sequence
                self.preempt(victim, decision)
                if victim is sequence:
                    break
            else:
                self.cache.grow(sequence, len(sequence.tokens))
                scheduled.append(sequence)
        self._return(scheduled, decision)

    def _return(self, scheduled: list[Sequence], decision: Decision) -> None:
        self.running = scheduled + self.running
        for sequence in scheduled:
            self.compute(sequence, 1, decision)


class NanoVllm(TwoPhases):
    """As documented: the length decides, what is not cached is charged."""


class NanoVllmChunked(TwoPhases):
    """The later code: only what is not cached counts, in tokens and in blocks."""

    def _has_blocks(self, sequence: Sequence, cached: list[Block]) -> bool:
        held = sum(block.references > 0 for block in cached)
        return self.cache.free >= self.cache.blocks_for(len(sequence.tokens)) - held

    def _size(self, sequence: Sequence, cached: list[Block]) -> int:
        return len(sequence.tokens) - len(cached) * self.cache.size


class MiniVllm(TwoPhases):
    """The whole prompt is charged; decoding stops at the token budget too, after the next row asked for its block."""

    def _charge(self, sequence: Sequence, num_tokens: int, left: int) -> int:
        return min(len(sequence.tokens), left)

    def _decode(self, decision: Decision) -> None:
        scheduled: list[Sequence] = []
        while self.running:
            sequence = self.running.pop(0)
            if self.cache.missing(sequence, len(sequence.tokens)) > self.cache.free:
                if self.running:
                    self.running.insert(0, sequence)
                    self.preempt(self.running.pop(), decision)
                else:
                    self.preempt(sequence, decision)
                    break
            elif len(scheduled) >= min(self.settings.max_num_batched_tokens, self.settings.max_num_seqs):
                self.running.insert(0, sequence)
                break
            else:
                self.cache.grow(sequence, len(sequence.tokens))
                scheduled.append(sequence)
        self._return(scheduled, decision)
