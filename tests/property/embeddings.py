"""The shadow host's encoder: tracks the cached embeddings, and refuses a step that needs a missing one."""

from __future__ import annotations

from collections.abc import Hashable

from pointsman.core import EncoderEntry, EncoderInput, Request, SchedulerConfig, SchedulerOutput

from .faults import require


def placeholder_marks(request: Request) -> dict[int, Hashable]:
    """The content at each placeholder of a prompt, and the place in the content."""
    return {
        position: (item.entry, item.length, item.mask, position - item.start)
        for item in request.encoder_inputs
        for position in range(item.start, item.end)
    }


def inputs_between(request: Request, start: int, end: int) -> list[EncoderInput]:
    """The encoder inputs with embeddings at positions [start, end)."""
    return [
        item
        for item in request.encoder_inputs
        if item.num_embeddings
        and any(
            item.mask is None or item.mask[position - item.start] == "1"
            for position in range(max(start, item.start), min(end, item.end))
        )
    ]


class ShadowEncoder:
    """An encoder and the embeddings that it has computed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._budget = config.encoder_budget
        self._size = config.encoder_cache_size
        self.present: dict[EncoderEntry, bool] = {}
        """The cached embeddings, and whether each is valid: a void step may have computed garbage."""

    def snapshot(self) -> dict[EncoderEntry, bool]:
        return dict(self.present)

    def execute(self, output: SchedulerOutput) -> None:
        """Free and compute embeddings, and check that every row has those that it needs."""
        for entry in output.freed_encoder_entries:
            self.present.pop(entry, None)
        num_computed = 0
        for request, index in output.encoder_inputs:
            entry = request.encoder_inputs[index].entry
            require(request in output.requests, f"{entry} is computed for {request.request_id}, which does not run")
            require(entry not in self.present, f"{entry} is computed, and it is there")
            self.present[entry] = True
            num_computed += entry.num_embeddings
        require(num_computed <= self._budget, f"{num_computed} embeddings in a step, of {self._budget}")
        total = sum(entry.num_embeddings for entry in self.present)
        require(total <= self._size, f"{total} embeddings are kept, of {self._size}")
        needed = set[EncoderEntry]()
        for index, request in enumerate(output.requests):
            start = int(output.num_computed_tokens[index])
            for item in inputs_between(request, start, start + int(output.num_scheduled_tokens[index])):
                name = request.request_id
                require(item.entry in self.present, f"{name} computes {item}, whose embeddings are not there")
                require(self.present[item.entry], f"{name} computes {item} from the embeddings of a void step")
                needed.add(item.entry)
        for request, index in output.encoder_inputs:
            entry = request.encoder_inputs[index].entry
            require(entry in needed, f"{entry} is computed, and no row reaches it in this step")

    def distrust(self) -> None:
        """Mark all cached embeddings as invalid."""
        self.present = dict.fromkeys(self.present, False)

    def void(self, outputs: list[SchedulerOutput], before: dict[EncoderEntry, bool] | None) -> None:
        """Void these steps; `before`: the embeddings before the first one, if the workers never got it."""
        if before is not None:
            self.present = dict(before)
            return
        for output in outputs:
            for request, index in output.encoder_inputs:
                entry = request.encoder_inputs[index].entry
                if entry in self.present:
                    self.present[entry] = False
