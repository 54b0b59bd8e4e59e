"""The five actions of seed 000: free what finished, append decode slots, promote, preempt if need be, return.

Where its prose and its listing differ, the prose and the other descriptions hold: the victim is the latest, generated
tokens are kept, and no sequence is promoted if fewer blocks than the expected output would be left (here: while others
run, and at most what the limits of the sequence leave of that output). A finished sequence was freed at the end of the
step before, which comes to the same.
"""

from __future__ import annotations

from .sequences import Decision, Specification


class Textbook(Specification):
    def schedule(self) -> Decision:
        decision, cache = Decision(), self.cache
        appended = 0
        while appended < len(self.running):
            sequence = self.running[appended]
            if cache.missing(sequence, len(sequence.tokens)) <= cache.free:
                cache.grow(sequence, len(sequence.tokens))
                appended += 1
            else:
                self.preempt(self.running.pop(), decision)
        for sequence in self.running:
            self.compute(sequence, 1, decision)
        while self.waiting:
            sequence = self.waiting[0]
            cached = cache.look_up(sequence)
            held = sum(block.references > 0 for block in cached)
            needed = cache.blocks_for(len(sequence.tokens)) - held
            expected = min(self.settings.decode_reserve, sequence.limit - len(sequence.tokens))
            reserve = cache.blocks_for(expected) if self.running else 0
            if needed + reserve > cache.free:
                break
            cache.start(sequence, cached, len(sequence.tokens))
            self.running.append(self.waiting.pop(0))
            decision.cached[sequence.name] = sequence.computed
            self.compute(sequence, len(sequence.tokens) - sequence.computed, decision)
        return decision
