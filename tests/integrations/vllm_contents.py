"""Simulates the contents of each group's KV blocks, as workers write and read them by a scheduler's outputs.

A token's KV is identified by all tokens up to it. In a step each row writes its tokens, and then reads, for each of
them, the KV that its layers attend to: the whole context, a window, its chunk, or the state after the previous token.
States cached for prefixes take one block for each run of tokens. A row continues from the state that it wrote last, or
from the state after its cached prefix, and writes the state of the block in which its step ends. Blocks are zeroed and
copied before that. A row's encoder outputs are written in its first step, and read in all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)


@dataclass
class _Row:
    tables: list[list[int]]
    tokens: list[int]
    num_prompt_tokens: int
    prefixes: list[int] = field(default_factory=list)
    """For each token, a value that identifies it and all tokens before it."""
    runs: bool = False
    """Whether the row has computed tokens since its admission."""
    encoded: list[int] = field(default_factory=list)
    """A value that identifies each embedding of which layers store KV."""
    num_drafts: int = 0
    """Number of drafts of the row in this step."""
    state_column: int | None = None
    """Index of its newest state in the table of a group; None: it has no state of its own yet."""

    def prefix(self, position: int) -> int:
        for place in range(len(self.prefixes), position + 1):
            before = self.prefixes[-1] if self.prefixes else 0
            self.prefixes.append(hash((before, self.tokens[place])))
        return self.prefixes[position]


class Contents:
    """Processes outputs in order, and reports reads of KV that does not belong to the row."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self._config = kv_cache_config
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._decodes = any(isinstance(spec, CrossAttentionSpec) for spec in self._specs)
        """Whether layers store KV of encoder outputs."""
        self._copied: set[int] = set()
        self._drafted: set[tuple[int, int, int]] = set()
        """Place of the last written draft, which may have been rejected."""
        self._held: list[dict[tuple[int, int], int]] = [{} for _ in self._specs]
        self._rows: dict[str, _Row] = {}

    def take(self, output: SchedulerOutput, sample: Callable[[str, int], int]) -> None:
        """Process a step; `sample(request id, position)` is the token at a position after the prompt."""
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        self._prepare(output)
        steps: list[tuple[str, int, int]] = []
        for new in output.scheduled_new_reqs:
            tables = [list(ids) for ids in new.block_ids]
            tokens, encoded = list(new.prompt_token_ids), list[int]()
            for feature in new.mm_features:
                at, length = feature.mm_position.offset, feature.mm_position.length
                marks = [hash((feature.identifier, place)) for place in range(length)]
                if self._decodes:
                    encoded += marks
                else:
                    tokens[at : at + length] = marks
            self._rows[new.req_id] = _Row(tables, tokens, len(tokens), encoded=encoded)
            steps.append((new.req_id, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id]))
        cached = output.scheduled_cached_reqs
        for name, start, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            row = self._rows[name]
            for table, ids in zip(row.tables, blocks or ([],) * len(row.tables), strict=True):
                if name in cached.resumed_req_ids:
                    table.clear()
                    row.state_column, row.runs = None, False
                table += ids
            steps.append((name, start, output.num_scheduled_tokens[name]))
        if self._decodes:  # workers give embeddings to starting rows, in the order in which they read the rows
            started = [name for name, start, _ in steps if start == 0 and self._rows[name].encoded]
            assert list(output.scheduled_encoder_inputs) == started, "embeddings are another row's"
        for name, start, count in steps:
            row, drafts = self._rows[name], output.scheduled_spec_decode_tokens.get(name, [])
            row.tokens += [sample(name, position) for position in range(len(row.tokens), start + count - len(drafts))]
            row.tokens += drafts
            row.num_drafts = len(drafts)
        for group, spec in enumerate(self._specs):
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
                self._continue_states(group, spec, steps)
        for name, start, count in steps:
            row = self._rows[name]
            for group, spec in enumerate(self._specs):
                self._write(group, spec, row, start, start + count)
            row.runs = True
            size = self._state_size()
            row.state_column = -(-(start + count) // size) - 1 if size else None
        for name, start, count in steps:
            for group, spec in enumerate(self._specs):
                self._read(name, group, spec, self._rows[name], start, start + count)
        for name, drafts in output.scheduled_spec_decode_tokens.items():  # accepted drafts are sampled again
            row = self._rows[name]
            known = len(row.tokens) - len(drafts)
            del row.tokens[known:], row.prefixes[known:]

    def _state_size(self) -> int:
        sizes = [s.block_size for s in self._specs if isinstance(s, MambaSpec) and s.mamba_cache_mode == "align"]
        return sizes[0] if sizes else 0

    def _prepare(self, output: SchedulerOutput) -> None:
        """Zero and copy blocks."""
        for spec, held in zip(self._specs, self._held, strict=True):
            for block in output.new_block_ids_to_zero or ():
                for offset in range(spec.block_size):
                    held.pop((block, offset), None)
            for copy in output.kv_cache_block_copies or ():
                self._copied.add(copy.dst_block_id)
                for offset in range(spec.block_size):
                    held.pop((copy.dst_block_id, offset), None)
                    if (copy.src_block_id, offset) in held:
                        held[copy.dst_block_id, offset] = held[copy.src_block_id, offset]
        self._copied -= set(output.new_block_ids_to_zero or ()) - {
            copy.dst_block_id for copy in output.kv_cache_block_copies or ()
        }

    def _continue_states(self, group: int, spec: MambaSpec, steps: list[tuple[str, int, int]]) -> None:
        """Each row copies its newest state into the block in which its step ends."""
        held, read, written = self._held[group], dict[int, str](), dict[int, str]()
        for name, start, count in steps:
            row = self._rows[name]
            table, before = row.tables[group], row.state_column
            if before is None:
                before = (start - 1) // spec.block_size
            if before >= 0:
                block = table[before]
                assert held.get((block, 0)) == row.prefix(start - 1), f"{name} continues from another state at {start}"
                read[block] = name
            block = table[-(-(start + count) // spec.block_size) - 1]
            assert block != 0, f"{name} writes its state to the null block"
            assert block not in written, f"{name} and {written[block]} write the same state"
            written[block] = name
        for block, name in written.items():
            assert read.get(block, name) == name, f"{name} overwrites what {read[block]} continues from"

    def _keep_within(self, group: int, spec: MambaSpec, row: _Row, start: int, end: int) -> None:
        """Some layers store one more state, from the middle of a chunk."""
        unit = getattr(self._config, "cache_hit_alignment_tokens", self._config.hash_block_size)
        position = get_mamba_prefill_checkpoint_position(end, unit, False)
        if spec.num_prefill_checkpoint_blocks and is_mamba_prefill_checkpoint_valid(
            query_start=start,
            query_end=end,
            checkpoint_position=position,
            hash_block_size=self._config.hash_block_size,
            mamba_block_size=spec.block_size,
            checkpoint_alignment=spec.prefill_checkpoint_alignment,
        ):
            block = row.tables[group][-(-end // spec.block_size) - 2]
            if block:
                self._held[group][block, 0] = row.prefix(position - 1)

    def _write(self, group: int, spec: Any, row: _Row, start: int, end: int) -> None:
        held, table = self._held[group], row.tables[group]
        if isinstance(spec, CrossAttentionSpec):
            assert len(table) == -(-len(row.encoded) // spec.block_size), "there are blocks for other embeddings"
            for position, mark in enumerate(row.encoded if start == 0 else ()):
                held[table[position // spec.block_size], position % spec.block_size] = mark
            return
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
            held[table[-(-end // spec.block_size) - 1], 0] = row.prefix(end - 1)
            self._keep_within(group, spec, row, start, end)
            return
        if isinstance(spec, MambaSpec):
            assert len(set(table)) == 1 + spec.num_speculative_blocks and 0 not in table, "each draft has a state"
            if start:  # the state of the newest token, or after an accepted draft
                assert row.prefix(start - 1) in [held.get((block, 0)) for block in table], "the state is another row's"
            for draft in range(1 + row.num_drafts):
                held[table[draft], 0] = row.prefix(end - 1 - row.num_drafts + draft)
            return
        if isinstance(spec, CircularBufferSpec):  # holds the newest tokens, whatever their positions
            assert len(table) == 1 and table[0], "a request has one block"
            if row.runs:
                assert held.get((table[0], 0)) == row.prefix(start - 1), "the ring is another request's"
            held[table[0], 0] = row.prefix(end - 1)
            return
        for position in range(start, end):
            block = table[position // spec.block_size]
            assert block != 0, "a token is written to the null block"
            place, drafted = (block, position % spec.block_size), (group, block, position % spec.block_size)
            stale = held.get(place, row.prefix(position)) != row.prefix(position) and drafted not in self._drafted
            (self._drafted.add if position >= end - row.num_drafts else self._drafted.discard)(drafted)
            assert not (stale and self._config.needs_kv_cache_zeroing) or block in self._copied, "a block is not zeroed"
            held[block, position % spec.block_size] = row.prefix(position)

    def _read(self, name: str, group: int, spec: Any, row: _Row, start: int, end: int) -> None:
        if isinstance(spec, MambaSpec | CircularBufferSpec):
            return
        if isinstance(spec, CrossAttentionSpec):
            for position, mark in enumerate(row.encoded):
                found = self._held[group].get(
                    (row.tables[group][position // spec.block_size], position % spec.block_size)
                )
                assert found == mark, f"{name} reads the KV of another embedding at {position}"
            return
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.sliding_window + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = start // spec.attention_chunk_size * spec.attention_chunk_size
        positions = [*range(first, end)]
        if isinstance(spec, RSWASpec):
            tail = max(row.num_prompt_tokens, start - spec.rswa_window + 1)
            positions = [*range(min(row.num_prompt_tokens, end)), *range(tail, end)]
        for position in positions:
            block = row.tables[group][position // spec.block_size]
            found = self._held[group].get((block, position % spec.block_size))
            assert found == row.prefix(position), (
                f"{name} reads another KV at {position} of group {group}: block {block}"
            )
