"""What an output says beside tokens: events, log probabilities, how the prompt was computed.

Most outputs say nothing more. Whose next one does is kept here, and theirs alone are gone through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pointsman.core import Request
from pointsman.integrations.vllm.results import Sampled


class Details:
    """Of the requests of one scheduler.

    Args:
        requests: vLLM's requests that have not ended, by id.
        of_id: ours, by the ids of vLLM's.
        cached_block_size: tokens per block that prompts are cached in; None: none are.
    """

    def __init__(
        self, requests: Mapping[str, Any], of_id: Mapping[str, Request], cached_block_size: int | None
    ) -> None:
        self._requests = requests
        self._of_id = of_id
        self._cached_block_size = cached_block_size
        self._once: set[str] = set()  # in their next output
        self._always: set[str] = set()

    def add(self, request: Any) -> None:
        """One of vLLM's requests is queued."""
        sampling = request.sampling_params
        if request.trace_headers or (sampling is not None and sampling.num_logprobs is not None):
            self._always.add(request.request_id)

    def note(self, name: str) -> None:
        """The next output of a request has something to tell."""
        self._once.add(name)

    def forget(self, name: str) -> None:
        """There are no further outputs of a request."""
        self._once.discard(name)
        self._always.discard(name)

    def tell(self, outputs: list[Any], indices: Sequence[int], sampled: Sampled, result: Any) -> None:
        """Put the details into outputs, of the rows with these indices, from a `ModelRunnerOutput`."""
        masks, nans = result.sampling_masks, result.num_nans_in_logits
        if self._always or nans or masks is not None:
            self._tell_tensors(outputs, indices, sampled, result)
        if not self._once:
            return
        for output in reversed(outputs):  # mostly it is about the last ones, who were admitted in this step
            name = output.request_id
            if name in self._once:
                self._once.discard(name)
                self._tell_events(name, output)
                output.new_prompt_logprobs_tensors = result.prompt_logprobs_dict.get(name)
                output.prompt_token_id_logprobs = result.prompt_token_id_logprobs_dict.get(name)
                if not self._once:
                    return

    def _tell_tensors(self, outputs: list[Any], indices: Sequence[int], sampled: Sampled, result: Any) -> None:
        """What the runner made beside tokens."""
        masks, nans = result.sampling_masks, result.num_nans_in_logits
        for index, output in zip(indices, outputs, strict=True):
            name = output.request_id
            if name in self._always:
                request = self._requests[name]
                output.trace_headers = request.trace_headers
                if result.logprobs is not None and request.sampling_params.num_logprobs is not None:
                    place, count = sampled.place(index), len(output.new_token_ids)
                    output.new_logprobs = result.logprobs.slice_request(place, count)
            if masks is not None and output.new_token_ids:
                output.new_sampling_mask = masks.slice_request(sampled.place(index), len(output.new_token_ids))
            if nans and name in nans:
                output.num_nans_in_logits = nans[name]

    def _tell_events(self, name: str, output: Any) -> None:
        request = self._requests[name]
        output.events = request.take_events()
        stats = request.take_prefill_stats()
        if stats is not None:
            if self._cached_block_size is not None:
                ours = self._of_id[name]
                count = ours.num_prompt_tokens if ours.use_prefix_cache else 0
                stats.finalize(count - count % self._cached_block_size)
            output.prefill_stats = stats
