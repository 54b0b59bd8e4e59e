"""Images in our scheduler inside vLLM, one situation after the other: a script for the environment with vLLM.

    python vllm_image_cases.py   prints one JSON line: the observed events

The scheduler is built as vLLM's engine core builds it; a stand-in for the model runner samples, and keeps embeddings as
workers do.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
from _scheduler_worker import Settings
from _vllm_runner import StandInRunner
from _vllm_worker import build_config, build_kv_cache_config, feature_of, stand_in_for_encoder
from vllm import SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pointsman.integrations.vllm import Scheduler
from tests.integrations.vllm_decisions import HASH

BLOCK_SIZE = 8


class Host:
    """Our scheduler, and a runner."""

    def __init__(
        self,
        encoder: tuple[int, int],
        *,
        num_blocks: int = 64,
        budget: int = 64,
        v2: bool = False,
        events: bool = False,
        is_encoder_decoder: bool = False,
    ) -> None:
        settings = Settings(
            num_blocks=num_blocks, max_model_len=512, max_num_seqs=min(8, budget), max_num_batched_tokens=512
        )
        config = build_config(settings)
        stand_in_for_encoder(config, encoder, is_encoder_decoder=is_encoder_decoder)
        kv_cache_config = build_kv_cache_config(num_blocks, BLOCK_SIZE)
        if is_encoder_decoder:
            config.cache_config.enable_prefix_caching = False
            spec = CrossAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
            kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["of the encoder"], spec))
        config.scheduler_config.max_num_batched_tokens = budget
        config.additional_config = {"pointsman": {"socket": "", "preset": "vllm"}}
        if events:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.scheduler._outputs._v2_runner = v2
        self.runner = StandInRunner(BLOCK_SIZE)
        self.computed: list[list[str]] = []
        """The images that each step computes."""
        self.held: set[str] = set()
        self.new: dict[str, Any] = {}
        self.ended: dict[str, str] = {}
        self.tokens: list[dict[str, int]] = []

    def add(self, name: str, prompt: list[int] | None, *images: tuple[str, int, str], **options: Any) -> Request:
        """`options` are of vLLM's `Request`, and `max_tokens`."""
        features = [feature_of(*image) for image in images]
        for feature in features:
            feature.data = MultiModalKwargsItem({})
        params = SamplingParams(max_tokens=options.pop("max_tokens", 1), ignore_eos=True)
        request = Request(
            name, None if prompt is None else list(prompt), params, None, mm_features=features,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, HASH), **options,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.scheduler.core.check_invariants()
        for new in output.scheduled_new_reqs:
            self.new[new.req_id] = new
        self.held -= set(output.free_encoder_mm_hashes)
        named = [
            self.new[name].mm_features[index].identifier
            for name, indices in output.scheduled_encoder_inputs.items()
            for index in indices
        ]
        assert not self.held & set(named), "embeddings are computed that are there"
        self.held |= set(named)
        self.computed.append(named)
        self.tokens.append(dict(output.num_scheduled_tokens))
        told = self.scheduler.update_from_output(output, self.runner.execute(output, lambda name, position: 7))
        for client in told.values():
            for each in client.outputs:
                if each.finish_reason is not None:
                    self.ended[each.request_id] = str(each.finish_reason)
        return output

    def run(self, most: int = 200) -> None:
        for _ in range(most):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"{list(self.scheduler.requests)} never end")


def too_large() -> list[Any]:
    host = Host((8, 12))
    host.add("large", [1] * 40, ("cat", 4, "1" * 9))
    host.add("small", [1] * 40, ("dog", 4, "1" * 8))
    host.run()
    return [host.ended, host.held == {"dog"}]


def another_number() -> list[Any]:
    """An identifier with another number of embeddings fails its request; once they are dropped, it may run."""
    host = Host((8, 12))
    host.add("one", [1] * 20, ("cat", 4, "11111"), max_tokens=4)
    host.step()
    host.add("two", [1] * 20, ("cat", 4, "111111"))
    host.add("both", [1] * 20, ("dog", 0, "11"), ("dog", 8, "111"))
    host.add("same", [2] * 20, ("cat", 4, "11111"))
    host.run()
    first = dict(host.ended)
    host.add("evicts", [1] * 20, ("cow", 0, "1" * 8))
    host.run()
    host.add("later", [3] * 20, ("cat", 4, "111111"))
    host.run()
    return [first, host.ended["later"], sum("cat" in step for step in host.computed)]


def short_chunks() -> list[Any]:
    """Budgets below a block, and less than a block between two images: every step makes progress."""
    steps = []
    for budget, encoder in ((3, (4, 4)), (5, (4, 8)), (64, (4, 4))):
        host = Host(encoder, budget=budget)
        images = [(f"image{n}", 2 + 7 * n, "1111") for n in range(6)]
        for name in ("a", "b"):
            host.add(name, [9] * 50, *images, max_tokens=3)
        host.run()
        assert all(host.tokens[:-1]), "a step computes nothing"
        steps.append(len(host.tokens))
    return steps


def held_while_waiting() -> list[Any]:
    """Of two requests whose images fill the cache, the one that lacks KV holds none, and both end."""
    host = Host((16, 16), num_blocks=10, budget=64)
    host.add("a", [1] * 40, ("cat", 2, "1" * 16), max_tokens=20)
    host.add("b", [2] * 40, ("cat", 2, "1" * 16), ("dog", 20, "1" * 16))
    host.step()
    holders = [request.request_id for request in host.scheduler.core._encoder.holders()]
    host.add("c", [3] * 16, ("cow", 0, "1" * 16))
    host.run()
    return [holders, sorted(host.ended.values())]


def payload(v2: bool) -> list[bool]:
    """Whether workers get the payload of images that the cached prefix covers."""
    host = Host((16, 16), v2=v2)
    image = ("cat", 2, "1" * 8)
    for name in ("a", "b"):
        host.add(name, [1] * 40, image, ("dog", 34, "1" * 4))
        if not v2:
            host.run()
            continue
        output = host.scheduler.schedule()  # the second runner is not simulated here
        host.new[name] = output.scheduled_new_reqs[0]
        host.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        result = StandInRunner(BLOCK_SIZE).execute(output, lambda name, position: 7)
        host.scheduler.update_from_output(output, result)
    assert host.new["b"].num_computed_tokens == 32
    return [feature.data is not None for feature in host.new["b"].mm_features]


def reset() -> list[Any]:
    host = Host((16, 32))
    for name in ("a", "b", "c"):
        host.add(name, [ord(name)] * 20, ("cat", 2, "1" * 8))
        host.run()
        if name == "b":
            host.scheduler.reset_encoder_cache()
            host.held.clear()
    return [step for step in host.computed if step]


def session() -> list[Any]:
    """A prompt in parts, each with an image of its own."""
    host = Host((16, 32))
    host.add("s", [1] * 20, ("cat", 2, "1" * 8), resumable=True)
    for _ in range(3):
        host.step()
    host.add("s", [2] * 12, ("dog", 3, "1" * 8), resumable=True)
    host.step()
    host.scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    host.run()
    return [[step for step in host.computed if step], host.new["s"].mm_features[1].mm_position.offset]


def events() -> list[bool]:
    """The hashes of blocks with images are vLLM's own."""
    host = Host((16, 32), events=True)
    found: list[Any] = []
    host.scheduler._kv_events._publisher.publish = lambda batch: found.extend(batch.events)
    request = host.add("a", [1] * 40, ("cat", 6, "11011111"), ("dog", 20, "1" * 8), cache_salt="salt")
    host.run()
    told = [each for event in found for each in event.block_hashes]
    keys = [each for event in found for each in event.extra_keys or ()]
    return [told == [maybe_convert_block_hash(each) for each in request.block_hashes[:5]], keys]


def embeddings() -> list[Any]:
    """Prompts given as embeddings, wholly or partly: found by their bytes, under vLLM's hashes."""
    host = Host((0, 0), events=True)
    found: list[Any] = []
    host.scheduler._kv_events._publisher.publish = lambda batch: found.extend(batch.events)
    rows = torch.arange(3 * 20 * 4, dtype=torch.float32).reshape(3, 20, 4)
    rows[1, :8] = rows[0, :8]
    hits, hashes = [], []
    is_token = [place < 3 for place in range(20)]
    for number, (prompt, vectors, options) in enumerate((
        (None, rows[0], {}),
        (None, rows[1], {}),
        (None, rows[2], {}),
        (None, rows[0], {}),
        ([5] * 20, rows[0], {"prompt_is_token_ids": is_token}),
        ([5] * 20, rows[0], {"prompt_is_token_ids": is_token}),
        ([0] * 20, None, {}),
    )):  # fmt: skip
        request = host.add(f"r{number}", prompt, prompt_embeds=vectors, max_tokens=9, **options)
        host.run()
        request.append_output_token_ids([7] * 4)
        hits.append(host.new[f"r{number}"].num_computed_tokens)
        hashes += [maybe_convert_block_hash(each) for each in request.block_hashes[:3]]
    told = [each for event in found for each in event.block_hashes]
    assert host.new["r4"].prompt_is_token_ids == is_token and host.new["r0"].prompt_token_ids is None
    host.add("parts", None, prompt_embeds=rows[0], resumable=True)
    host.run()
    return [hits, set(hashes) <= set(told), host.ended["parts"]]


def encoder_decoder() -> list[Any]:
    """Each request's inputs are computed for it alone; a request that can never run is refused."""
    host = Host((16, 16), num_blocks=6, budget=64, is_encoder_decoder=True)
    for name, prompt, size, options in (
        ("large", 4, 17, {}),
        ("in parts", 4, 8, {"resumable": True}),
        ("too long beside it", 30, 16, {}),
        ("alone", 30, 0, {}),
        ("a", 4, 8, {}),
        ("b", 4, 8, {}),
    ):
        images = [("cat", 0, "1" * size)] if size else []
        host.add(name, [1] * prompt, *images, max_tokens=3, **options)
    freed = []
    while host.scheduler.has_requests():
        freed.append(host.step().free_encoder_mm_hashes)
    return [host.ended, [step for step in host.computed if step], [step for step in freed if step]]


def main() -> None:
    init_none_hash(HASH)
    logging.getLogger("vllm.pointsman").setLevel(logging.CRITICAL)
    found = {
        "too large": too_large(),
        "another number": another_number(),
        "short chunks": short_chunks(),
        "held while waiting": held_while_waiting(),
        "payload": payload(v2=False),
        "payload, second runner": payload(v2=True),
        "reset": reset(),
        "session": session(),
        "events": events(),
        "embeddings": embeddings(),
        "encoder-decoder": encoder_decoder(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
