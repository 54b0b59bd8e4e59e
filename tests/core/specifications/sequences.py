"""What the specifications have in common: sequences, a plain prefix cache, and the update after a step.

Nothing here imports the library. Three things are decided by a system's block manager and not by its scheduler, and the
five systems differ in them, so all specifications share one rule, the library's:

- which free block is overwritten first: one without cached content, then the least recently used one, a sequence's last
  block before its first;
- generated blocks can be found once their sequence finishes or is preempted, and until they are overwritten;
- of two blocks with the same content each can be found, the one that was computed first before the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """A physical block; `key` is all tokens up to its end if its content can be found."""

    references: int = 0
    key: tuple[int, ...] | None = None


@dataclass(eq=False)
class Sequence:
    """A request: its known tokens, how many of them are computed, and the blocks it holds."""

    name: str
    prompt: list[int]
    limit: int
    """Number of tokens at which it finishes."""
    arrival: int
    priority: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    table: list[Block] = field(default_factory=list)
    is_cut: bool = False
    """Its known tokens are computed in part."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)


class Cache:
    """Blocks of `size` tokens, and where content can be found."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.num_blocks = num_blocks
        self.blank = [Block() for _ in range(num_blocks)]
        self.cached: list[Block] = []  # free, least recently used first
        self.holders: dict[tuple[int, ...], list[Block]] = {}

    @property
    def free(self) -> int:
        return len(self.blank) + len(self.cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def look_up(self, sequence: Sequence) -> list[Block]:
        """Cached blocks of its known tokens; one token is always left to compute."""
        found: list[Block] = []
        for end in range(self.size, len(sequence.tokens), self.size):
            holders = self.holders.get(tuple(sequence.tokens[:end]))
            if not holders:
                break
            found.append(holders[0])
        return found

    def start(self, sequence: Sequence, cached: list[Block], num_tokens: int) -> None:
        """Take the cached blocks, and new ones until `num_tokens` fit."""
        for block in cached:
            if block.references == 0:
                self.cached.remove(block)
            block.references += 1
        sequence.table = list(cached)
        sequence.computed = len(cached) * self.size
        sequence.published = len(cached)
        self.grow(sequence, num_tokens)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, self.blocks_for(num_tokens) - len(sequence.table))

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        for _ in range(self.missing(sequence, num_tokens)):
            if self.blank:
                block = self.blank.pop()
            else:
                block = self.cached.pop(0)
                self._forget(block)
            block.references = 1
            sequence.table.append(block)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the blocks that the first `num_tokens` tokens fill findable."""
        for index in range(sequence.published, num_tokens // self.size):
            key = tuple(sequence.tokens[: (index + 1) * self.size])
            sequence.table[index].key = key
            self.holders.setdefault(key, []).append(sequence.table[index])
            sequence.published = index + 1

    def publish_prompt(self, sequence: Sequence) -> None:
        self.publish(sequence, min(sequence.computed, len(sequence.prompt)))

    def release(self, sequence: Sequence) -> None:
        """Return its blocks; what they hold, generated tokens included, can be found until it is overwritten."""
        self.publish(sequence, min(sequence.computed, len(sequence.tokens)))
        for block in reversed(sequence.table):
            block.references -= 1
            if block.references == 0:
                (self.blank if block.key is None else self.cached).append(block)
        sequence.table, sequence.computed, sequence.published, sequence.is_cut = [], 0, 0, False

    def _forget(self, block: Block) -> None:
        assert block.key is not None
        self.holders[block.key].remove(block)
        block.key = None


@dataclass
class Settings:
    """The configuration of a specification."""

    num_blocks: int
    block_size: int
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    decode_reserve: int = 0
    by_priority: bool = False


@dataclass
class Decision:
    """A step: the scheduled tokens of each sequence, in order; the preempted; the cached tokens of each admission."""

    tokens: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)


class Specification:
    """Two queues and a cache; `schedule` is each system's own."""

    cache_type: type[Cache] = Cache
    shares_within_step = True
    """Whether a sequence finds the prompt blocks that one before it computes in the same step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache = self.cache_type(settings.num_blocks, settings.block_size)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.step: dict[Sequence, int] = {}

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Decision:
        raise NotImplementedError

    def preempt(self, sequence: Sequence, decision: Decision) -> None:
        """Take its blocks, keep its tokens, and put it at the front of the queue."""
        self.cache.release(sequence)
        self.waiting.insert(0, sequence)
        decision.preempted.append(sequence.name)

    def samples(self) -> Iterable[Sequence]:
        """The sequences that sample a token in this step: those with all known tokens computed."""
        return [sequence for sequence in self.step if sequence.computed == len(sequence.tokens)]

    def compute(self, sequence: Sequence, num_tokens: int, decision: Decision) -> None:
        """Schedule `num_tokens` of it in this step."""
        sequence.computed += num_tokens
        sequence.is_cut = sequence.computed < len(sequence.tokens)
        self.step[sequence] = decision.tokens[sequence.name] = num_tokens
        if self.shares_within_step:
            self.cache.publish_prompt(sequence)

    def update(self, sampled: dict[str, int]) -> list[str]:
        """Append the samples; a finished sequence leaves at once, before the next step does anything."""
        finished: list[str] = []
        for sequence in self.step:
            self.cache.publish_prompt(sequence)
        for sequence in list(self.samples()):
            sequence.tokens.append(sampled[sequence.name])
            if len(sequence.tokens) == sequence.limit:
                finished.append(sequence.name)
        for sequence in [s for s in self.running if s.name in finished]:
            self.cache.release(sequence)
            self.running.remove(sequence)
        self.step = {}
        return finished
