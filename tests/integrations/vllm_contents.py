"""What the KV blocks of each group hold, as workers would write and read them by what a scheduler's outputs say.

A token's KV is told by all tokens up to it. In a step each row writes its tokens, and then reads, for each of them,
what its layers attend to: the whole context, a window, its chunk, or the state behind the token before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec


@dataclass
class _Row:
    tables: list[list[int]]
    tokens: list[int]
    prefixes: list[int] = field(default_factory=list)
    """For each token, what tells it and all before it."""

    def prefix(self, position: int) -> int:
        for place in range(len(self.prefixes), position + 1):
            before = self.prefixes[-1] if self.prefixes else 0
            self.prefixes.append(hash((before, self.tokens[place])))
        return self.prefixes[position]


class Contents:
    """Takes outputs in order, and says what a row would read that is not its own."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._held: list[dict[tuple[int, int], int]] = [{} for _ in self._specs]
        self._rows: dict[str, _Row] = {}

    def take(self, output: SchedulerOutput, sample: Callable[[str, int], int]) -> None:
        """A step; `sample(request id, position)` is the token at a position behind the prompt."""
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        steps: list[tuple[str, int, int]] = []
        for new in output.scheduled_new_reqs:
            tables = [list(ids) for ids in new.block_ids]
            tokens = list(new.prompt_token_ids)
            for feature in new.mm_features:
                at, length = feature.mm_position.offset, feature.mm_position.length
                tokens[at : at + length] = [hash((feature.identifier, place)) for place in range(length)]
            self._rows[new.req_id] = _Row(tables, tokens)
            steps.append((new.req_id, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id]))
        cached = output.scheduled_cached_reqs
        for name, start, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            row = self._rows[name]
            for table, ids in zip(row.tables, blocks or ([],) * len(row.tables), strict=True):
                if name in cached.resumed_req_ids:
                    table.clear()
                table += ids
            steps.append((name, start, output.num_scheduled_tokens[name]))
        for name, start, count in steps:
            row, drafts = self._rows[name], output.scheduled_spec_decode_tokens.get(name, [])
            row.tokens += [sample(name, position) for position in range(len(row.tokens), start + count - len(drafts))]
            row.tokens += drafts
            for group, spec in enumerate(self._specs):
                self._write(group, spec, row, start, start + count)
        for name, start, count in steps:
            for group, spec in enumerate(self._specs):
                self._read(name, group, spec, self._rows[name], start, start + count)
        for name, drafts in output.scheduled_spec_decode_tokens.items():  # what is accepted is sampled again
            row = self._rows[name]
            known = len(row.tokens) - len(drafts)
            del row.tokens[known:], row.prefixes[known:]

    def _write(self, group: int, spec: Any, row: _Row, start: int, end: int) -> None:
        held, table = self._held[group], row.tables[group]
        if isinstance(spec, MambaSpec):
            if start:
                assert held.get((table[0], 0)) == row.prefix(start - 1), "the state is another request's"
            held[table[0], 0] = row.prefix(end - 1)
            return
        for position in range(start, end):
            block = table[position // spec.block_size]
            assert block != 0, "a token is written to the null block"
            held[block, position % spec.block_size] = row.prefix(position)

    def _read(self, name: str, group: int, spec: Any, row: _Row, start: int, end: int) -> None:
        if isinstance(spec, MambaSpec):
            return
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.sliding_window + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = start // spec.attention_chunk_size * spec.attention_chunk_size
        for position in range(first, end):
            block = row.tables[group][position // spec.block_size]
            found = self._held[group].get((block, position % spec.block_size))
            assert found == row.prefix(position), (
                f"{name} reads another KV at {position} of group {group}: block {block}"
            )
