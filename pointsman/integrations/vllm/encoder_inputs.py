"""Encoder inputs: converts vLLM's multimodal inputs (images, audio, video) to the core's.

vLLM identifies an input by a digest of its content, or by the name that the client gave it. Requests with equal
identifiers share embeddings and cached prefixes, and the workers store embeddings by identifier alone. So a request is
refused if its identifier was seen with another number of embeddings: then the content differs.

A prompt, or a part of it, may be given as embeddings, which need no encoder. Where prefixes are cached, each block of
such a prompt is an input of the core that needs no computation; the input's key is a digest of the block's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pointsman.core import ConfigError, EncoderInput, RequestRefused
from pointsman.core import SchedulerOutput as Output

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request as VLLMRequest

MORE_EMBEDDINGS = "raise --max-num-batched-tokens, which bounds both, or send a smaller one"


def encoder_sizes(vllm_config: VllmConfig) -> tuple[int, int]:
    """Two maximum numbers of embeddings, as vLLM computes them: the embeddings that a step computes, and the embeddings
    in the encoder cache.

    Raises:
        ConfigError: vLLM cannot compute the numbers for this model and these limits.
    """
    if not vllm_config.model_config.supports_multimodal_inputs:
        return 0, 0
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    try:
        budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY)
    except Exception as error:  # the type of the error depends on the model's processor
        raise ConfigError(
            f"vLLM cannot compute the number of embeddings of this model's inputs: {error}; serve text alone with "
            "--language-model-only"
        ) from error
    if not budget.encoder_compute_budget or not budget.encoder_cache_size:
        return 0, 0  # the limit of every kind of input (images, audio, video) is 0
    return budget.encoder_compute_budget, budget.encoder_cache_size


class EncoderInputs:
    """The encoder inputs of all unfinished requests, and the inputs whose embeddings are cached.

    Args:
        budget: maximum number of embeddings that a step computes.
        cache_size: maximum number of embeddings in the cache.
    """

    def __init__(self, budget: int, cache_size: int) -> None:
        self._budget, self._cache_size = budget, cache_size
        self._most = min(budget, cache_size)
        self._num_embeddings: dict[str, int] = {}
        """Number of embeddings by identifier, for inputs of unfinished requests and inputs whose embeddings are
        cached."""
        self._num_users: dict[str, int] = {}
        """Number of unfinished requests that have an input, by the input's identifier."""
        self._of_request: dict[str, dict[str, int]] = {}
        """By request id: the identifiers of the request's inputs, each with its number of embeddings."""
        self._cached: set[str] = set()

    def begin(self, request: VLLMRequest) -> list[EncoderInput]:
        """Convert the inputs of a request of vLLM's.

        Raises:
            RequestRefused: an input can never be computed, or its identifier belongs to other content.
        """
        inputs = [_to_input(feature) for feature in request.mm_features]
        own: dict[str, int] = {}
        known, most = self._num_embeddings, self._most
        for at, (key, start, _, count, _) in enumerate(inputs):
            assert count is not None
            if count > most:
                raise _make_refusal(
                    request,
                    f"its {request.mm_features[at].modality} at token {start} has {count} embeddings, of at most "
                    f"{self._budget} in a step and {self._cache_size} in the encoder cache; {MORE_EMBEDDINGS}",
                )
            before = own.get(key)
            if before is None:
                before = known.get(key, count)
            if before != count:
                raise _make_refusal(
                    request,
                    f"its {request.mm_features[at].modality} at token {start} has {count} embeddings, and the "
                    f"identifier {key!r} is that of another one with {before}; give different content different "
                    "identifiers",
                )
            own[key] = count
        self._of_request[request.request_id] = own
        known.update(own)
        num_users = self._num_users
        for key in own:
            num_users[key] = num_users.get(key, 0) + 1
        return inputs

    def end(self, name: str) -> None:
        """Forget the inputs of a request that has finished. In a session (a prompt that comes in parts): of a part that
        has finished."""
        for key in self._of_request.pop(name, ()):
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key]
                if key not in self._cached:
                    del self._num_embeddings[key]

    def scheduled_inputs(self, output: Output) -> dict[str, list[int]]:
        """By vLLM's request id: the indices of the inputs that a step computes."""
        found: dict[str, list[int]] = {}
        for request, index in output.encoder_inputs:
            found.setdefault(request.metadata.request_id, []).append(index)
            self._cached.add(request.encoder_inputs[index].key)
        return found

    def freed_identifiers(self, output: Output) -> list[str]:
        """The identifiers whose embeddings the workers drop before a step."""
        keys = [entry.key for entry in output.freed_encoder_entries]
        for key in keys:
            self._cached.discard(key)
            if key not in self._num_users:
                self._num_embeddings.pop(key, None)
        return keys


class EncoderDecoderInputs:
    """The encoder inputs of encoder-decoder models; used instead of `EncoderInputs`.

    The prompt has no placeholders for these inputs. Their embeddings are computed in the first step of a request, and
    again in the first step after a preemption; the cross-attention layers store KV of the embeddings. So all inputs of
    a request are one input of the core, at the first token, and no other request shares it.

    Args:
        budget: maximum number of embeddings that a step computes.
        v2_runner: whether vLLM's second model runner reads the outputs.
    """

    def __init__(self, budget: int, *, v2_runner: bool) -> None:
        self._budget = budget
        self._v2_runner = v2_runner
        self._num_begun = 0
        self._identifiers: dict[str, list[str]] = {}
        """vLLM's identifiers of the inputs whose embeddings the workers have, by the core's key."""

    def begin(self, request: VLLMRequest) -> list[EncoderInput]:
        """Convert the inputs of a request of vLLM's to one input.

        Raises:
            RequestRefused: the input can never be computed, or the prompt comes in parts.
        """
        count = sum(feature.mm_position.get_num_embeds() for feature in request.mm_features)
        if request.resumable:
            raise _make_refusal(
                request, "the prompt of an encoder-decoder model cannot come in parts; send it in one piece"
            )
        if count > self._budget:
            raise _make_refusal(
                request,
                f"its {request.mm_features[0].modality} has {count} embeddings, of at most {self._budget} in a step; "
                "raise --max-num-batched-tokens, or send a smaller one",
            )
        self._num_begun += 1
        return [EncoderInput(f"{self._num_begun}", 0, 1, count)] if count else []

    def end(self, name: str) -> None:
        """Do nothing: no request shares an input, so nothing is kept after its request has finished."""

    def scheduled_inputs(self, output: Output) -> dict[str, list[int]]:
        """By vLLM's request id: the indices of the inputs that a step computes. vLLM's first model runner assigns the
        inputs to requests in the order of this dictionary: first the new requests, then the resumed requests."""
        rows = [*zip(output.admitted, output.is_resumed.tolist(), strict=True)]
        if not self._v2_runner:
            rows.sort(key=lambda row: row[1])
        found: dict[str, list[int]] = {}
        for request, _ in rows:
            if request.encoder_inputs:
                features = request.metadata.mm_features
                self._identifiers[request.encoder_inputs[0].key] = [each.identifier for each in features]
                found[request.metadata.request_id] = list(range(len(features)))
        return found

    def freed_identifiers(self, output: Output) -> list[str]:
        """The identifiers whose embeddings the workers drop before a step."""
        return [name for entry in output.freed_encoder_entries for name in self._identifiers.pop(entry.key, ())]


TO_DIGITS = bytes.maketrans(b"\0\1", b"01")


def _make_refusal(request: VLLMRequest, why: str) -> RequestRefused:
    return RequestRefused(f"request {request.request_id!r} refused: {why}")


def _to_input(feature: MultiModalFeatureSpec) -> EncoderInput:
    """Convert one of vLLM's inputs, and count its embeddings."""
    position = feature.mm_position
    length: int = position.length
    is_embed = position.is_embed
    if is_embed is None:
        return EncoderInput(feature.identifier, position.offset, length, length)
    bits = is_embed.numpy().tobytes()  # one byte for each placeholder token: whether it stands for an embedding
    count = bits.count(1)
    mask = None if count == length else bits.translate(TO_DIGITS).decode()
    return EncoderInput(feature.identifier, position.offset, length, count, mask)


GIVEN = "embeddings:"
"""Prefix of the key of a block that is given as embeddings."""


def embedding_block_inputs(request: VLLMRequest, block_size: int) -> list[EncoderInput]:
    """The inputs that identify the blocks of a prompt given as embeddings, by a digest of all bytes of each block, as
    vLLM does."""
    from vllm.v1.utils import tensor_data

    embeddings, end = request.prompt_embeds, request.num_prompt_tokens
    inputs = []
    for start in range(0, end, block_size):
        length = min(block_size, end - start)
        digest = request._prompt_embeds_per_block_hashes.get((start, start + length))  # exists only for full blocks
        if digest is None:
            digest = hashlib.sha256(tensor_data(embeddings[start : start + length])).digest()
        inputs.append(EncoderInput(GIVEN + digest.hex(), start, length, 0, "0" * length))
    return inputs


def shift_inputs(features: Sequence[MultiModalFeatureSpec], num_tokens: int) -> list[MultiModalFeatureSpec]:
    """The inputs of a further part of a prompt, with their positions increased by the `num_tokens` tokens of earlier
    parts."""
    return [
        replace(feature, mm_position=replace(feature.mm_position, offset=feature.mm_position.offset + num_tokens))
        for feature in features
    ]
