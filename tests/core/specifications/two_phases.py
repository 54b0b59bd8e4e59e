"""nano-vLLM and miniVLLM: a step is for prompts or for decoding. docs/reference/presets.md names the version of each.

One thing is added to each: a preempted sequence that has outgrown the token budget, which the originals never admit
again, is computed over several steps, as nano-vLLM's main branch does with any long prompt. It can only be the first of
a step, and continues first in the next. Decoding stops at the token budget in all of them; nano-vLLM exceeds it.
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
        """What must fit the remaining budget."""
        return len(sequence.tokens)

    def _charge(self, sequence: Sequence, num_tokens: int, left: int) -> int:
        return num_tokens

    def _decode(self, decision: Decision) -> None:
        scheduled: list[Sequence] = []
        while self.running and len(scheduled) < self._max_rows:
            sequence = self.running.pop(0)
            while not self._can_append(sequence):
                victim = self.running.pop() if self.running else sequence
                self.preempt(victim, decision)
                if victim is sequence:
                    break
            else:
                self.cache.grow(sequence, len(sequence.tokens))
                scheduled.append(sequence)
        self._return(scheduled, decision)

    @property
    def _max_rows(self) -> int:
        return min(self.settings.max_num_seqs, self.settings.max_num_batched_tokens)

    def _can_append(self, sequence: Sequence) -> bool:
        return self.cache.missing(sequence, len(sequence.tokens)) <= self.cache.free

    def _return(self, scheduled: list[Sequence], decision: Decision) -> None:
        self.running = scheduled + self.running
        for sequence in scheduled:
            self.compute(sequence, 1, decision)


class NanoVllm(TwoPhases):
    """Of 2026-04-13 (seed 004): the length must fit the budget, what is not cached is charged."""


class NanoVllmChunked(TwoPhases):
    """The main branch: only what is not cached counts, in tokens and in blocks; blocks are cached after the step."""

    shares_within_step = False

    def _has_blocks(self, sequence: Sequence, cached: list[Block]) -> bool:
        return self.cache.free >= self.cache.blocks_for(len(sequence.tokens)) - held(cached)

    def _size(self, sequence: Sequence, cached: list[Block]) -> int:
        return len(sequence.tokens) - len(cached) * self.cache.size


class MiniVllmNewest(TwoPhases):
    """The whole prompt is charged, its blocks are counted without those that others hold; no row beyond the step."""

    def _charge(self, sequence: Sequence, num_tokens: int, left: int) -> int:
        return min(len(sequence.tokens), left)

    def _has_blocks(self, sequence: Sequence, cached: list[Block]) -> bool:
        return self.cache.free >= self.cache.blocks_for(len(sequence.tokens)) - held(cached)


class MiniVllm(TwoPhases):
    """As documented (seed 001), with `can_append` repaired: the row beyond the step's last one asks for its block."""

    def _charge(self, sequence: Sequence, num_tokens: int, left: int) -> int:
        return min(len(sequence.tokens), left)

    def _decode(self, decision: Decision) -> None:
        scheduled: list[Sequence] = []
        while self.running:
            sequence = self.running.pop(0)
            if not self._can_append(sequence):
                if self.running:
                    self.running.insert(0, sequence)
                    self.preempt(self.running.pop(), decision)
                else:
                    self.preempt(sequence, decision)
                    break
            elif len(scheduled) >= self._max_rows:
                self.running.insert(0, sequence)
                break
            else:
                self.cache.grow(sequence, len(sequence.tokens))
                scheduled.append(sequence)
        self._return(scheduled, decision)


class MiniVllmAsListed(MiniVllm):
    """Its `can_append` as it stands: it asks for a block when the last one has just been filled, not when one lacks."""

    def _can_append(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) % self.cache.size != 0 or self.cache.free > 0


def held(blocks: list[Block]) -> int:
    """How many of them some sequence holds, so that they cost no free block."""
    return sum(block.references > 0 for block in blocks)
