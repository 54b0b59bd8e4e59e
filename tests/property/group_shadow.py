"""The shadow host of a model whose KV is in groups: a block table for each group of layers, with holes.

Each group's layers write every position, and read those that they attend to: all before it, a window, or a chunk. So a
block returned to the pool too early, a block of another group, and a cached block of other content all show as a wrong
read.
"""

from __future__ import annotations

from itertools import takewhile

from pointsman.core import KVGroup, Request, SchedulerConfig, SchedulerOutput

from .faults import ShadowFault, require
from .shadow import GARBAGE, UNWRITTEN, ExecutedStep, HostSequence, ShadowHost

Placed = tuple[int, int, int]  # a group, a place in its table, and the block there


def reads_from(group: KVGroup, position: int) -> int:
    """The first position to which a token attends in the layers of a group."""
    if group.kind == "window":
        return max(0, position - group.size + 1)
    return position - position % group.size if group.kind == "chunk" else 0


class GroupShadowHost(ShadowHost):
    """As `ShadowHost`, for groups of layers. The table of a sequence is the list of its `Placed` blocks, in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.num_holes = 0  # blocks that an admission lacked

    def blocks_in_use(self) -> set[int] | None:
        """Returned blocks are not reported."""
        return None

    def table(self, request: Request) -> list[int]:
        return [block for _, _, block in self.placed(request)]

    def placed(self, request: Request) -> list[Placed]:
        """The blocks of a request, as reported to the host."""
        table: list[Placed] = list(self.sequences[request].table or [])  # type: ignore[arg-type]
        return table

    def spoil(self, request: Request, step: ExecutedStep) -> None:
        held = {block for other in self.sequences if other is not request for block in self.table(other)}
        held |= self.device.blocks() if self.device is not None else set()
        for slot in step.written.get(request, ()):
            rewritten = self.last_writes[slot] != step.output.step_id
            if slot // self.config.block_size not in held and not rewritten:
                self.slots[slot] = GARBAGE

    def _take_table(self, output: SchedulerOutput, index: int) -> None:
        sequence = self.sequences[output.requests[index]]
        name = sequence.request.request_id
        row, serial = int(output.rows[index]), int(output.serials[index])
        mine = output.block_rows == index
        columns = (output.block_groups[mine], output.block_places[mine], output.block_ids[mine])
        told: list[Placed] = list(zip(*(column.tolist() for column in columns), strict=True))
        if index >= output.num_continued:
            require(sequence.table is None, f"{name} is admitted although it has a row")
            if self.device is not None:
                held = set(self.device.holders.get(sequence.request, ()))
                mine = {block for _, _, block in told}
                require(mine >= held, f"{name} is admitted with {told}, it holds {held}")
                if held:
                    self.device.resumed.add(sequence.request)
                self.device.let_go(sequence.request)
            sequence.table, sequence.row, sequence.serial = told, row, serial  # type: ignore[assignment]
            sequence.admitted_step = output.step_id
            self._renew_contents(sequence)
            end = max(place for _, place, _ in told) + 1
            self.num_holes += end * len(self.config.kv_groups) - len(told)
        else:
            require(sequence.table is not None, f"{name} continues without having been admitted")
            same = (sequence.row, sequence.serial) == (row, serial)
            require(same, f"{name} continues as row {row} serial {serial}, not {sequence.row}, {sequence.serial}")
            sequence.table = told if output.resync else [*(sequence.table or []), *told]  # type: ignore[list-item]
        if index >= output.num_continued or output.resync:
            sequence.is_stale = False
        if self.device is not None:
            self.device.check_free([block for _, _, block in told], name)
        require(len(set(told)) == len(told), f"{name} gets a block twice: {told}")
        groups = {block: group for group, _, block in told}
        require(all(groups[block] == group for group, _, block in told), f"{name} has a block in two groups: {told}")
        low, high = self.config.num_reserved_blocks, self.config.num_blocks
        require(all(low <= block < high for block in groups), f"{name} got a block outside {low}..{high - 1}: {told}")

    def _check_common_prefix(self, output: SchedulerOutput) -> None:
        """The reported common prefix, if enabled, is that of the tables of the first group of full attention."""
        full = next((index for index, group in enumerate(self.config.kv_groups) if group.is_full), None)
        tables = [[block for group, _, block in self.placed(each) if group == full] for each in output.requests]
        same = takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False))
        common = len(list(same)) if self.config.count_common_prefix else 0
        told = output.num_common_prefix_blocks
        require(told == common, f"{told} blocks are reported as common to the rows, {common} are, of {tables}")

    def _slots_of(self, sequence: HostSequence, positions: range) -> list[list[int]]:
        """[groups, positions] slot of each; -1: the host got no block there."""
        size = self.config.block_size
        tables: list[dict[int, int]] = [{} for _ in self.config.kv_groups]
        for group, place, block in self.placed(sequence.request):
            tables[group][place] = block
        return [
            [table[at // size] * size + at % size if at // size in table else -1 for at in positions]
            for table in tables
        ]

    def _write_slots(self, sequence: HostSequence, computed: range) -> list[list[int]]:
        slots = self._slots_of(sequence, computed)
        name = sequence.request.request_id
        require(all(-1 not in row for row in slots), f"{name} computes {computed}, and lacks blocks for it: {slots}")
        return slots

    def _read(self, sequence: HostSequence, end: int, start: int = 0) -> None:
        """Read the positions to which `start` to `end` attend, in each group."""
        for index, (group, slots) in enumerate(
            zip(self.config.kv_groups, self._slots_of(sequence, range(end)), strict=True)
        ):
            for position in range(reads_from(group, min(start, end - 1)), end):
                slot, expected = slots[position], sequence.contents[position]
                found = self.slots[slot] if slot >= 0 else UNWRITTEN
                if found != expected:
                    what = {UNWRITTEN: "nothing", GARBAGE: "garbage of a failed step"}.get(found, f"content {found}")
                    raise ShadowFault(
                        f"{sequence.request.request_id} reads position {position} of {end} in group {index} ({group}), "
                        f"block {slot // self.config.block_size}, and finds {what}, expected content {expected}"
                    )
