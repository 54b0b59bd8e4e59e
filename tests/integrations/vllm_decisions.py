"""Random workloads through vLLM's own scheduler and ours, in lockstep: a script for the environment with vLLM.

    python vllm_decisions.py FIRST COUNT [groups|states|images|encoder|sessions|grammars|intervals]

prints one JSON line: counts of events, and the differences (with the root of the repository and its benchmarks in
PYTHONPATH). With "groups", the KV is in several layouts; with "states", some of it is states that are not cached, and
rows verify drafts; with "images", prompts have some, under small encoder budgets and caches; with "encoder", models are
encoder-decoders; with "sessions", some prompts come in parts; with "grammars", some outputs follow a grammar, which is
compiled meanwhile; with "intervals", prompts are computed at intervals, of which the scheduler or the host decides.

Both are built as vLLM's engine core builds them, and get the same calls. A stand-in for the model runner executes their
decisions; its token is a function of the request and the position. In every step the requests, their tokens,
preemptions and ends must be equal, and so must the outputs for clients. In ours each row must read its own KV, in every
group.

The following differs, even with the preset "vllm", and is left out of the comparison:

- Without chunked prefill, a preempted request may be resumed in chunks. In vLLM it waits for a step with enough budget
  for all of it.
- With two steps in flight, a step may compute tokens of a request that is then preempted or finishes. They can be found
  again at once, at most one block more than in vLLM. If blocks run out, other prefixes are then evicted.
- With two steps in flight, an adapter's slot is free when its last request has finished. vLLM frees it a step earlier,
  when the last token of that request is in flight.
- No drafts are made beyond `max_tokens`; vLLM makes them and drops the result.
- Embeddings of images are evicted when a step is decided, and only those that it does not need; vLLM evicts while it
  decides, also for a request that then does not start. So one keeps embeddings that the other computes again. With
  those that it has kept, a request starts with a longer chunk, for which blocks may be missing, and others find more
  budget.
- A row waits for the embeddings that it reads in this step; vLLM lets it wait, and hold them, from the first
  placeholder on.
- A partial prefill with images gets no tokens, and no space for embeddings, that a preemption of the same step
  releases.
- With two steps in flight embeddings are released a step earlier. A row that waits for embeddings keeps the slot of its
  adapter; in vLLM before 0.33 another adapter may take it for this step.
- With `--disable-chunked-mm-input`, vLLM 0.33 never computes an image that is longer than a step or than
  `--long-prefill-token-threshold`, and vLLM 0.31 splits an image whose embeddings it has kept. Here the first is split,
  and the second is not. 0.31 and 0.32 split an image at the beginning of a chunk; 0.33 waits for a step that holds all
  of it. If `token_limits` decide the length of chunks, such an image may be split in every version.
- A request that lacks embeddings, or a slot for its adapter, is bypassed by 64 others at most (`max_overtakes`); vLLM
  has no bound. In vLLM before 0.33, and with its preset, no request bypasses one that lacks embeddings.
- `--long-prefill-token-threshold-adaptive`, and the rule that a lone request has no threshold, count the requests that
  run or may start. vLLM counts those too that wait for a grammar or for the next part of their prompt.
- A session that continues with its next part is queued like any request. vLLM's own keeps its blocks between two parts,
  and admits it before others. A session between two parts takes no sequence slot here, and is not in
  `vllm:num_requests_waiting`. Its output is already part of its prompt, and tokens that a part does not find in the
  prefix cache are recomputed. Workers are notified that it ends with each part, and begins with the next.
- A request whose grammar cannot be compiled, or refuses a token, ends at once. In vLLM's own the first ends when its
  turn in the queue comes. Where one ends by its grammar in a step with other ends, its blocks are released last, and
  are evicted later.
- The status of a request whose grammar is ready changes at once. In vLLM's own it changes when its turn in the queue
  comes.
- With vLLM 0.33's second model runner, workers keep the payload of an image as long as its request; vLLM's own notifies
  them when to drop it.
- Where states are cached, `--enable-mamba-shared-prefix-checkpoint` keeps nothing more.
- Without chunked prefill a prompt starts with all its embeddings; vLLM computes what comes before the first that is
  missing.
- Under `--scheduling-policy priority` vLLM may lose embeddings that a request was to compute when it preempts it in the
  same step, and fails where another request needs them. Here they are computed.
- Other requests can find a request's generated tokens once it releases its blocks; in vLLM's own as soon as a block is
  full.
- If blocks run out, fewer drafts are verified; vLLM preempts requests for them, so evictions also differ. If there is
  no block beside the reserves for the placeholders of a first decode, it starts without them; in vLLM it waits.
- vLLM waits forever for a step that holds a first decode and its placeholders, if `--max-num-batched-tokens` is not
  above the number of drafts, and fails if `--long-prefill-token-threshold` is not. Here such a row has no placeholders.
- A request whose output outgrows the pool, alone, finishes with `length`. In vLLM it preempts itself forever.

With several groups of KV:

- Other requests can find generated tokens once their request releases its blocks; in vLLM's own as soon as a block is
  full, even if it has since left a window. So resumed requests find other parts. With cached states, generated tokens
  can be found a step after their block is full.
- Blocks that leave windows managed by the core are evicted in another order, so in a short pool other prefixes are
  found (Gemma 3 with images: one more in the test).
- Where states are cached and steps run ahead, a request that waits for the state of another one's prompt is admitted a
  step earlier: vLLM's own enters that state once more while the first sample behind the prompt is in flight.
- Where states are cached inside blocks and layers keep one within a chunk (Mamba 2, Kimi's KDA), a chunk that begins
  inside a block stops at the block's end; vLLM's own runs past it, and then caches the wrong state for that position.
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import sys
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from _scheduler_worker import EOS, Settings
from _vllm_runner import StandInRunner
from _vllm_worker import build_config, build_kv_cache_config, feature_of, stand_in_for_encoder
from vllm.config import SpeculativeConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as OwnScheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pointsman.core import Reason
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.film_format import Op
from pointsman.integrations.vllm import Scheduler
from pointsman.integrations.vllm.support import is_before
from pointsman.web.film import Film
from tests.integrations.vllm_contents import Contents

READ = (
    "max_num_running_reqs",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "max_num_encoder_input_tokens",
    "max_model_len",
    "block_size",
    "hash_block_size",
    "num_spec_tokens",
    "num_lookahead_tokens",
    "policy",
    "log_stats",
    "enable_kv_cache_events",
    "is_encoder_decoder",
    "use_v2_model_runner",
)
"""Attributes of a scheduler that others read, and that never change."""
MAX_STEPS = 3_000
MAX_REQUESTS = 40
NUM_TOKENS = 9  # number of different sampled tokens; 0 to 4 may be stop tokens
MAX_EMBEDDINGS = 24  # maximum of a request to an encoder-decoder
HASH = get_hash_fn_by_name("sha256")


@dataclass
class Workload:
    """A configuration, and the events before each step."""

    seed: int
    scheduler: dict[str, Any]
    num_blocks: int
    block_size: int
    caches: bool
    asynchronous: bool
    max_loras: int
    num_drafts: int = 0
    layout: tuple[tuple[str, int, int], ...] = ()
    """Kind, block size, and window or chunk of each group; empty: one group of full attention."""
    hash_size: int = 0
    """Tokens of a hash with several groups; 0: the size of the smallest block."""
    retention: int | None = None
    """vLLM's `prefix_cache_retention_interval`."""
    is_strict: bool = False
    """Whether no decision may differ, because nothing runs out; see also `_may_do_more`."""
    held_by_host: bool = False
    """Whether the host holds prompts back, as in data parallel engines, and not the scheduler's own interval."""
    encoder: tuple[int, int] = (0, 0)
    """Maximum embeddings of a step, and of the cache."""
    is_encoder_decoder: bool = False
    arrivals: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    """Requests whose prompts come in parts."""
    compiled: dict[int, list[str]] = field(default_factory=dict)
    """Requests whose grammar is ready before a step is scheduled."""
    aborts: dict[int, list[str]] = field(default_factory=dict)
    """Before a step is scheduled."""
    late_aborts: dict[int, list[str]] = field(default_factory=dict)
    """While a step is in flight."""


def make_layout(rng: random.Random, block_size: int) -> tuple[tuple[str, int, int], ...]:
    """Groups of KV whose block sizes have `block_size` as their least common multiple."""
    window, half = rng.randrange(1, 5 * block_size), block_size // 2
    full, windows = ("full", block_size, 0), ("window", block_size, window)
    return rng.choice(
        (
            (full, windows),
            (windows,),
            (full, windows, ("window", block_size, window)),
            (full, ("window", half, window)),
            (("full", half, 0), windows),
            (full, ("chunk", block_size, rng.randrange(1, 4) * block_size)),
            (full, ("state", 0, 0), ("state", 0, 0)),
            (full, ("cached state", block_size, 0), ("cached state", block_size, 0)),
            (full, ("cached state", block_size, 0)),
            (("cached state", block_size, 0),),
            (full, windows, ("cached state", block_size, 0)),
            (full, ("cached state", block_size, 1)),  # this kind stores one more state within a chunk
            (("prompt and window", block_size, window),),
            (full, ("prompt and window", block_size, window)),
            (full, ("ring", half, 0)),
        )
    )


def make_workload(seed: int, kind: str = "") -> Workload:
    """A random workload with small pools and budgets, and similar prompts; `kind` as on the command line."""
    in_groups, has_images, has_encoder = kind in ("groups", "states"), kind == "images", kind == "encoder"
    rng = random.Random(seed)
    block_size = rng.choice((2, 4, 8))
    max_model_len = rng.randrange(16, 80)
    blocks_of_longest = -(-max_model_len // block_size)
    num_usable = rng.choice((blocks_of_longest, blocks_of_longest + 3, 2 * blocks_of_longest, 5 * blocks_of_longest))
    chunked = rng.random() < 0.75 and not has_encoder
    max_num_seqs = rng.randrange(1, 13)
    min_budget = max_num_seqs if chunked else max(max_model_len, max_num_seqs)
    scheduler = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": min_budget + rng.choice((0, 3, 10, 40)),
        "enable_chunked_prefill": chunked,
        "policy": rng.choice(("fcfs", "priority")),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "watermark": rng.choice((0.0, 0.0, 0.1, 0.3)),
        "max_num_active_seqs": rng.choice((None, None, max(1, max_num_seqs // 2))),
        "long_prefill_token_threshold": rng.choice((0, 0, 3, 7)) if chunked else 0,
    }
    scheduler["long_prefill_token_threshold_adaptive"] = rng.random() < 0.5
    asynchronous, caches = rng.random() < 0.4 and kind != "states", rng.random() < 0.7
    if asynchronous and caches:  # see the module's docstring: when blocks run out, cache hits differ
        num_usable = MAX_REQUESTS * blocks_of_longest
    layout = make_layout(rng, block_size) if in_groups else ()
    while kind == "states" and not any(each == "state" for each, _, _ in layout):
        layout = make_layout(rng, block_size)
    if has_encoder:
        layout, caches = (("full", block_size, 0), ("encoder", block_size, 0)), False
    if layout:  # at least the longest request, as vLLM checks when it starts
        blocks_of_longest = sum(_blocks_of_longest(kind, size, max_model_len) for kind, size, _ in layout)
        num_usable = max(blocks_of_longest, num_usable * len(layout))
    kinds = {kind for kind, _, _ in layout}
    if "state" in kinds:
        caches = False
    hash_size, retention = 0, None
    if "cached state" in kinds:
        caches = True
        if len(layout) > 1 and rng.random() < 0.5:
            hash_size = rng.choice([size for size in (1, 2, 4, 8) if size < block_size])
        retention = rng.choice((None, None, 0, 2 * block_size))
        if asynchronous:  # as above
            num_usable = MAX_REQUESTS * blocks_of_longest
    workload = Workload(
        seed,
        scheduler,
        num_blocks=1 + num_usable,
        block_size=block_size,
        caches=caches,
        asynchronous=asynchronous,
        # see the module's docstring: the release of slots differs
        max_loras=0 if asynchronous else rng.choice((0, 0, 1, 2)),
        layout=layout,
        hash_size=hash_size,
        retention=retention,
    )
    if has_images and is_before(vllm.__version__, "0.33"):
        workload.max_loras = 0  # see the module's docstring: a row that waits for embeddings keeps its adapter's slot
    _fill(workload, rng, max_model_len)
    num_drafts = 0 if asynchronous else random.Random(f"{seed} drafts").choice((0, 0, 1, 3, 8))
    threshold = scheduler["long_prefill_token_threshold"] or math.inf
    # vLLM's own fails, or hangs: see the module's docstring
    if num_drafts < min(threshold, scheduler["max_num_batched_tokens"]):
        workload.num_drafts = num_drafts
    if kind == "states":
        most = min(threshold, scheduler["max_num_batched_tokens"], block_size) - 1
        workload.num_drafts = min(rng.choice((1, 3)), most)
        workload.num_blocks += workload.num_drafts * len(layout)
    elif {"state", "cached state", "ring"} & kinds:  # here each draft has a state of its own
        workload.num_drafts = 0
    if workload.num_drafts and caches:  # see the module's docstring: evictions differ
        workload.num_blocks = max(workload.num_blocks, 1 + MAX_REQUESTS * blocks_of_longest)
    if has_images:
        workload.num_drafts = 0
        _add_images(workload, rng)
    if kind == "sessions":
        _add_parts(workload, rng)
    if kind == "intervals":
        # vLLM's own counts requests that wait for an adapter's slot as backlog otherwise: see the module's docstring.
        workload.max_loras = 0
        for request in (request for requests in workload.arrivals.values() for request in requests):
            request["lora"] = 0
        workload.scheduler["prefill_schedule_interval"] = rng.choice((2, 3, 5, 12))
        workload.held_by_host = is_before(vllm.__version__, "0.33") or rng.random() < 0.5
    if kind == "grammars":
        _add_grammars(workload, rng)
    workload.is_strict = has_encoder or kind == "states"
    if has_encoder:
        _add_sounds(workload, rng)
    return workload


def make_shared(number: int) -> Workload:
    """Requests with common beginnings in the same steps, over cached states: they wait for each other's states."""
    rng = random.Random(number)
    block_size, max_model_len = 8, 120
    scheduler = {
        "max_model_len": max_model_len,
        "max_num_seqs": 8,
        "max_num_batched_tokens": rng.choice((20, 64, 300)),
        "enable_chunked_prefill": True,
        "policy": "fcfs",
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "watermark": 0.0,
        "max_num_active_seqs": None,
        "long_prefill_token_threshold": rng.choice((0, 0, 5, 20)),
        "long_prefill_token_threshold_adaptive": rng.random() < 0.5,
    }
    workload = Workload(
        number,
        scheduler,
        num_blocks=1000,
        block_size=block_size,
        caches=True,
        asynchronous=number % 2 == 1,
        max_loras=0,
        layout=(("full", block_size, 0), ("cached state", block_size, 0), ("cached state", block_size, 0)),
        hash_size=rng.choice((0, 2, 4)),
        is_strict=True,
    )
    shared = [rng.randrange(100) for _ in range(max_model_len)]
    for name in range(6):
        prompt = [*shared[: rng.choice((24, 40, 41, 70))], *(rng.randrange(100) for _ in range(rng.randrange(8)))]
        request: dict[str, Any] = {
            "id": f"r{name}",
            "prompt": prompt,
            "params": {"max_tokens": 5},
            "priority": 0,
            "lora": 0,
        }
        request["arrival"] = rng.random()
        workload.arrivals.setdefault(rng.randrange(3), []).append(request)
    return workload


def make_preempted(number: int) -> Workload:
    """Requests that are preempted while their first token is in flight, half of them with prompt log probabilities."""
    rng = random.Random(number)
    block_size, max_model_len = 4, 40
    scheduler = {
        "max_model_len": max_model_len,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "enable_chunked_prefill": True,
        "policy": "fcfs",
        "scheduler_reserve_full_isl": False,
        "watermark": 0.0,
        "max_num_active_seqs": None,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
    }
    num_blocks = 1 + max_model_len // block_size
    workload = Workload(number, scheduler, num_blocks, block_size, caches=True, asynchronous=True, max_loras=0)
    step = 0
    for name in range(8):  # two at a time: they fill the pool when the second one begins
        length = rng.randrange(5, 19)
        request: dict[str, Any] = {
            "id": f"r{name}",
            "prompt": [rng.randrange(100) for _ in range(length)],
            "params": {"max_tokens": rng.randrange(1, 20), "ignore_eos": True},
            "priority": 0,
            "lora": 0,
            "arrival": float(name),
        }
        if rng.random() < 0.5:
            request["params"]["prompt_logprobs"] = 1
        workload.arrivals.setdefault(step, []).append(request)
        step += rng.randrange(1, 10)
    return workload


def _blocks_of_longest(kind: str, block_size: int, max_model_len: int) -> int:
    """Maximum number of blocks that a request holds in a group."""
    if kind == "encoder":
        return -(-MAX_EMBEDDINGS // block_size)
    if kind == "cached state":
        return 5  # the newest, the one before, one of a step in flight, one within a chunk, a copy
    return -(-max_model_len // block_size) + 1 if block_size and kind != "ring" else 1


_MAX_TOKENS = ("long_prefill_token_threshold", "max_num_batched_tokens")


def _add_images(workload: Workload, rng: random.Random) -> None:
    """Images at random places of the prompts; prompts that begin alike have the same ones there."""
    workload.scheduler["enable_chunked_prefill"] = True  # see the module's docstring: without it, prompts start whole
    splits = rng.random() < 0.3
    workload.scheduler["disable_chunked_mm_input"] = splits and not is_before(vllm.__version__, "0.32")  # see docs
    sizes = {}
    for number in range(rng.randrange(2, 9)):
        length = rng.randrange(1, 9)
        # see the module's docstring: vLLM's own never computes longer ones
        if workload.scheduler["disable_chunked_mm_input"]:
            threshold, budget = (workload.scheduler[name] for name in _MAX_TOKENS)
            length = min(length, threshold or budget, budget)
        masked = rng.random() < 0.4
        mask = "".join(rng.choice("011") for _ in range(length)) if masked else "1" * length
        sizes[f"image{number}"] = mask if "1" in mask else "1" * length
    largest = max(mask.count("1") for mask in sizes.values())
    total = sum(mask.count("1") for mask in sizes.values())
    budget, cache = (rng.choice((largest, largest + 2, 2 * largest, total)) for _ in range(2))
    # see the module's docstring: when they are released
    workload.encoder = (budget, 10_000 if workload.asynchronous else cache)
    gaps = rng.choice((3, 8, 20))
    for request in (request for requests in workload.arrivals.values() for request in requests):
        # Of the tokens before, so that equal beginnings have equal images.
        images, at, prompt = [], 0, request["prompt"]
        while True:
            chance = random.Random(f"{workload.seed} {prompt[: at + 1]}")
            at += chance.randrange(gaps)
            key = chance.choice(sorted(sizes))
            if at + len(sizes[key]) > len(prompt):
                break
            images.append((key, at, sizes[key]))
            for place in range(at, at + len(sizes[key])):
                prompt[place] = 0
            at += len(sizes[key])
        request["images"] = images


def _add_sounds(workload: Workload, rng: random.Random) -> None:
    """Inputs of an encoder-decoder, some of them repeated; some requests have none."""
    workload.is_encoder_decoder = True
    workload.scheduler["disable_chunked_mm_input"] = True  # as vLLM sets it for these models
    sizes = {f"sound{number}": rng.randrange(1, MAX_EMBEDDINGS + 1) for number in range(rng.randrange(2, 9))}
    largest = max(sizes.values())
    budget = rng.choice((largest, largest + 2, 2 * largest, sum(sizes.values())))
    workload.encoder = (budget, 10_000 if workload.asynchronous else budget)  # as for images
    for request in (request for requests in workload.arrivals.values() for request in requests):
        key = rng.choice(sorted(sizes))
        request["images"] = [(key, 0, "1" * sizes[key])] if rng.random() < 0.9 else []


def _add_parts(workload: Workload, rng: random.Random) -> None:
    """Some prompts come in parts. No resource runs out: see the module's docstring."""
    workload.caches, workload.num_drafts, workload.max_loras = True, 0, 0
    workload.num_blocks = 1 + MAX_REQUESTS * workload.num_blocks
    most = workload.scheduler["max_model_len"]
    workload.scheduler |= {"max_num_batched_tokens": MAX_REQUESTS * most, "max_num_seqs": MAX_REQUESTS}
    workload.scheduler |= _NO_THRESHOLD | {"max_num_active_seqs": None}
    parts: list[tuple[int, dict[str, Any]]] = []
    for step, request in [(step, each) for step, requests in workload.arrivals.items() for each in requests]:
        request["lora"] = 0
        if rng.random() < 0.5:
            continue
        workload.sessions.add(request["id"])
        request["resumable"] = True
        num_parts = rng.randrange(1, 4)
        share = most // (num_parts + 1)
        request["prompt"] = request["prompt"][: max(1, share // 2)]
        request["params"] = {"max_tokens": rng.randrange(1, max(2, share // 2))}
        for number in range(1, num_parts + 1):
            step += rng.choice((0, 1, 5, 20))
            is_last = number == num_parts
            params = {"max_tokens": rng.randrange(1, max(2, share // 2)), "ignore_eos": rng.random() < 0.5}
            prompt = [rng.randrange(100) for _ in range(1 if is_last else rng.randrange(1, max(2, share // 2)))]
            changes = {"prompt": prompt, "params": params, "resumable": not is_last}
            parts.append((step, {**request, **changes}))
    for step, part in parts:
        workload.arrivals.setdefault(step, []).append(part)


_NO_THRESHOLD = {"long_prefill_token_threshold": 0, "long_prefill_token_threshold_adaptive": False}


def _add_grammars(workload: Workload, rng: random.Random) -> None:
    """Some outputs follow a grammar, which is ready some steps later."""
    workload.scheduler |= _NO_THRESHOLD  # see the module's docstring: the counted requests differ
    if workload.caches:  # see the module's docstring: the order of releases differs when a grammar ends its request
        most = -(-workload.scheduler["max_model_len"] // workload.block_size)
        workload.num_blocks = max(workload.num_blocks, 1 + MAX_REQUESTS * most)
    for step, requests in workload.arrivals.items():
        for request in requests:
            if rng.random() < 0.6:
                request["grammar"] = rng.choice(("sound", "sound", "sound", "refuses"))
                workload.compiled.setdefault(step + rng.choice((0, 1, 3, 10)), []).append(request["id"])


class Grammar:
    """Allows the stand-in's samples; a grammar that "refuses" does not allow the token at one position."""

    def __init__(self, kind: str, seed: str) -> None:
        self._refused = random.Random(seed).randrange(1, 12) if kind == "refuses" else math.inf
        self._count = 0

    def accept_tokens(self, name: str, token_ids: list[int]) -> bool:
        for _ in token_ids:
            if self._count == self._refused:
                return False
            self._count += 1
        return True

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        valid = [token for token in token_ids if token <= NUM_TOKENS]  # wrong drafts have larger ids
        return valid[: int(min(len(valid), self._refused - self._count))]

    def rollback(self, count: int) -> None:
        self._count -= count

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        bitmask[row] = self._count

    def is_terminated(self) -> bool:
        return False


def grammars_of(config: Any) -> StructuredOutputManager:
    """vLLM's manager, with grammars that are assigned to requests."""
    manager = StructuredOutputManager(config)
    manager.backend = SimpleNamespace(  # type: ignore[assignment]
        allocate_token_bitmask=lambda count: torch.zeros((count, 1), dtype=torch.int32), destroy=lambda: None
    )
    return manager


def _fill(workload: Workload, rng: random.Random, max_model_len: int) -> None:
    prefixes = [[rng.randrange(100) for _ in range(max_model_len)] for _ in range(3)]
    span = rng.choice((1, 10, 40))
    for number in range(rng.randrange(3, MAX_REQUESTS)):
        length = rng.randrange(1, max_model_len)
        shared = rng.choice((0, rng.randrange(length + 1), length))
        prompt = rng.choice(prefixes)[:shared] + [rng.randrange(100) for _ in range(length - shared)]
        params: dict[str, Any] = {"max_tokens": rng.randrange(1, max_model_len + 10), "ignore_eos": rng.random() < 0.3}
        if rng.random() < 0.3:
            params["stop_token_ids"] = rng.sample(range(5), rng.randrange(1, 3))
        if rng.random() < 0.2:
            params["min_tokens"] = rng.randrange(params["max_tokens"] + 1)
        if random.Random(f"{workload.seed} {number} log probabilities").random() < 0.1:
            params["prompt_logprobs"] = 1  # such a request does not read the prefix cache
        request = {"id": f"r{number}", "prompt": prompt, "params": params, "priority": rng.randrange(3)}
        request["arrival"] = random.Random(f"{workload.seed} {number}").random()  # each front end has its clock
        request["lora"] = rng.randrange(4) if workload.max_loras else 0
        workload.arrivals.setdefault(rng.randrange(span), []).append(request)
        if rng.random() < 0.15:
            when = rng.choice((workload.aborts, workload.late_aborts))
            when.setdefault(rng.randrange(2 * span + 10), []).append(request["id"])


class Side:
    """One of the schedulers, with a runner of its own."""

    def __init__(self, workload: Workload, config: Any, scheduler_class: type) -> None:
        self.workload = workload
        kv_cache_config = build_kv_cache_config(workload.num_blocks, workload.block_size)
        self.hash_size = workload.block_size
        if workload.layout:
            most = workload.scheduler["max_model_len"]
            specs = [spec_of(each, most, workload.num_drafts) for each in workload.layout]
            kv_cache_config.kv_cache_groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)]
            self.hash_size = workload.hash_size or min(spec.block_size for spec in specs if spec.prefix_cacheable)
            kv_cache_config.prefix_cache_retention_interval = workload.retention
            kv_cache_config.hash_block_size = self.hash_size
            if hasattr(kv_cache_utils, "partial_hash_hits_enabled"):  # since 0.32 the engine sets it
                is_partial = kv_cache_utils.partial_hash_hits_enabled(kv_cache_config.kv_cache_groups, self.hash_size)
                kv_cache_config.cache_hit_alignment_tokens = self.hash_size if is_partial else workload.block_size
        stand_in_for_encoder(config, workload.encoder, is_encoder_decoder=workload.is_encoder_decoder)
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=grammars_of(config),
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)),
            hash_block_size=self.hash_size,
            log_stats=True,
        )
        self.runner = StandInRunner(0 if workload.layout else workload.block_size)
        self.contents = Contents(kv_cache_config)
        self.film: FilmRecorder | None = None
        if isinstance(self.scheduler, Scheduler) and workload.layout and workload.seed % 4 == 0:
            self.written = io.BytesIO()
            self.film = FilmRecorder(self.written)
            self.scheduler.core.start_film(self.film)
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.added: dict[str, Request] = {}
        self.embeddings: set[str] = set()
        """Embeddings of a worker, by identifier."""
        self.embeddings_before: set[str] = set()
        self.freed: set[str] = set()
        self.lacking: list[str] = []
        """Rows that read missing embeddings."""
        self.images: dict[str, list[Any]] = {}
        self.allowed: dict[str, tuple[int, set[int]]] = {}
        """By request: the position from which the sampler may choose stop tokens, and the stop tokens."""
        self.limits: dict[str, int] = {}
        """Maximum tokens of each request."""

    def compile(self, names: Iterable[str]) -> None:
        """The grammars of these requests are ready."""
        for name in names:
            structured = self.added[name].structured_output_request
            structured.grammar = Grammar(structured.params.regex, f"{self.workload.seed} {name}")

    def add(self, request: dict[str, Any]) -> None:
        params = SamplingParams(**request["params"])
        if kind := request.get("grammar"):
            params.structured_outputs = StructuredOutputsParams(regex=kind)
        params.update_from_generation_config({}, EOS)
        lora = request["lora"]
        length = len(request["prompt"])
        first = 0 if request["id"] in self.workload.sessions else length + params.min_tokens
        self.allowed[request["id"]] = first, params.all_stop_token_ids
        self.limits[request["id"]] = min(length + params.max_tokens, self.workload.scheduler["max_model_len"])
        hasher = get_request_block_hasher(self.hash_size, HASH) if self.workload.caches else None
        made = Request(
            request_id=request["id"],
            prompt_token_ids=list(request["prompt"]),
            sampling_params=params,
            pooling_params=None,
            arrival_time=request["arrival"],
            priority=request["priority"],
            lora_request=LoRARequest(f"lora{lora}", lora, "/nowhere") if lora else None,
            block_hasher=hasher,
            mm_features=[feature_of(*image) for image in request.get("images", ())],
            resumable=request.get("resumable", False),
        )
        self.added.setdefault(request["id"], made)
        self.scheduler.add_request(made)

    def reads(self) -> dict[str, Any]:
        """The attributes of a scheduler and of vLLM's requests, also finished ones, that others read."""
        scheduler = self.scheduler
        manager = scheduler.kv_cache_manager
        waiting = [each.request_id for each in scheduler.waiting]
        counts = [len(scheduler.running), len(waiting), len(scheduler.kv_holding_waiting)]
        running = [each.request_id for each in scheduler.running]
        first = scheduler.waiting.peek_request().request_id if waiting else None
        if self.workload.compiled or self.workload.sessions:  # see the module's docstring
            first = None
            waiting = sorted({*waiting, *(each.request_id for each in scheduler.kv_holding_waiting)})
            running, counts = sorted(running), []
        found: dict[str, Any] = {
            "running": running,
            "waiting": waiting,
            "next": first,
            "requests": sorted(scheduler.requests),
            "counts": counts,
            "finished": sorted(set(scheduler.finished_req_ids) - self.workload.sessions),
            "settings": [getattr(scheduler, name) for name in READ],
        }
        assert scheduler.vllm_config.scheduler_config is scheduler.scheduler_config
        if not (self.workload.layout or self.workload.sessions):  # the time of a release is not reported
            pool = manager.block_pool
            found["usage"] = [round(manager.usage, 9), round(pool.get_usage(), 9), pool.get_num_free_blocks()]
        for name, each in self.added.items():
            assert each.is_finished() == (name not in scheduler.requests)
            counts = (each.num_computed_tokens, each.num_preemptions, each.num_tokens, each.num_output_tokens)
            tokens = (len(each.all_token_ids), list(each.output_token_ids), str(each.get_finished_reason()))
            found[name] = [each.status.name, *counts, *tokens, not any(manager.get_block_ids(name))]
            found[name][0] = found[name][0].removesuffix("_FOR_STRUCTURED_OUTPUT_GRAMMAR")  # until checked
            if each.is_finished() or name in self.workload.sessions:
                del found[name][1]  # the number of computed tokens may differ
            else:
                found[name] += [each.num_output_placeholders, list(each.spec_token_ids), each.is_prefill_chunk]
                assert each.num_tokens_with_spec == each.num_tokens + len(each.spec_token_ids)
            idle = (RequestStatus.WAITING_FOR_STREAMING_REQ, RequestStatus.FINISHED_ABORTED)
            if name in self.workload.sessions and each.status in idle:  # ours: its output is part of its prompt
                found[name] = [each.status.name]
            elif name in self.workload.sessions:
                found[name].pop()
        return found

    def has(self, name: str) -> bool:
        """Whether the scheduler has the request and has not finished it."""
        return name in self.scheduler.requests

    def abort(self, names: list[str]) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def schedule(self, throttle_prefills: bool = False) -> dict[str, Any]:
        """Decide a step and execute it; returns the decisions. `throttle_prefills`: see vLLM's `schedule`."""
        output = self.scheduler.schedule(throttle_prefills)
        if isinstance(self.scheduler, Scheduler):
            self.scheduler.core.check_invariants()
            self.contents.take(output, self._sample)
            if self.film is not None:
                self._ask()
        if any(self.workload.encoder):
            self._encode(output)
        for new in output.scheduled_new_reqs:  # the next part of a session: a worker forgets the previous part
            if new.req_id in self.workload.sessions:
                self.runner.known.pop(new.req_id, None)
        self.in_flight.append((output, self.runner.execute(output, self._sample)))
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        freed = sorted(output.free_encoder_mm_hashes) if self.workload.is_encoder_decoder else []
        tokens = output.num_scheduled_tokens
        new = [each.req_id for each in output.scheduled_new_reqs]
        if self.workload.sessions:  # ends of rows: cache hits of later parts differ
            tokens = {name: starts[name] + count for name, count in tokens.items()}
            starts, new = {}, sorted(new)
        return {
            "tokens": tokens,
            "freed": freed,
            "drafts": output.scheduled_spec_decode_tokens,
            "starts": dict(sorted(starts.items())),
            "new": new,
            "resumed": sorted(cached.resumed_req_ids),
            "preempted": sorted(output.preempted_req_ids or ()),
            "finished": sorted(output.finished_req_ids - self.workload.sessions),  # ours also reports the ends of parts
            "encoder inputs": output.scheduled_encoder_inputs,
            "masks": None if output.pending_structured_output_tokens else self._masks(output),
        }

    def _masks(self, output: Any) -> list[Any] | None:
        """The bitmasks for sampling under grammars."""
        found = self.scheduler.get_grammar_bitmask(output)
        if found is None:
            return None
        acceptable = getattr(found, "num_acceptable_drafts", None)
        mask = None if found.grammar_bitmask is None else found.grammar_bitmask.tolist()
        return [found.structured_output_request_ids, mask, acceptable]

    def _encode(self, output: Any) -> None:
        """Handle embeddings like workers, and check that every row has the embeddings that it reads."""
        self.embeddings_before = set(self.embeddings)
        self.freed = set(output.free_encoder_mm_hashes)
        self.embeddings -= self.freed
        for new in output.scheduled_new_reqs:
            self.images[new.req_id] = new.mm_features
        for name, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                self.embeddings.add(self.images[name][index].identifier)
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            for feature in self.images[name]:
                at = feature.mm_position
                if self.workload.is_encoder_decoder:
                    if starts[name] == 0 and name not in output.scheduled_encoder_inputs:
                        self.lacking.append(f"{name} starts without {feature.identifier}")
                    continue
                first, last = max(starts[name] - at.offset, 0), min(starts[name] + count - at.offset, at.length)
                if first < last and at.is_embed[first:last].any() and feature.identifier not in self.embeddings:
                    self.lacking.append(f"{name} lacks {feature.identifier}")

    def _ask(self) -> None:
        """Check that operators' questions have answers."""
        core = self.scheduler.core
        stats = core.stats()
        assert 0 <= stats.num_cached_free_blocks <= stats.num_free_blocks <= stats.num_blocks
        for name in self.scheduler.of_id:
            told = core.explain(name)
            assert told.sentence and (told.num_blocks > 0) == (told.status.value == "running")

    def close(self) -> None:
        """Check that the film, which has no blocks, agrees with the decisions."""
        if self.film is not None:
            self.scheduler.core.remove_listener(self.film)
            self.film.close()
            film = Film(io.BytesIO(self.written.getvalue()))
            assert film.is_complete and not film.has_blocks
            preempted = sum(event.op is Op.PREEMPTED for event in film.events(0, None))
            assert preempted == self.scheduler.core.stats().num_preemptions
        self.scheduler.shutdown()

    def update(self) -> dict[str, Any]:
        """Process the result of the oldest step in flight; returns the outputs for clients, by request."""
        told: dict[str, Any] = {}
        output, result = self.in_flight.popleft()
        by_client = self.scheduler.update_from_output(output, result)
        waiting = [each for each, _ in self.in_flight if each.pending_structured_output_tokens]
        if waiting:
            told["masks"] = [self._masks(each) for each in waiting]
        if self.workload.num_drafts and result.req_ids:
            self.scheduler.update_draft_token_ids(self._drafts(output, result))
        for outputs in by_client.values():
            for each in outputs.outputs:
                reason = None if each.finish_reason is None else str(each.finish_reason)
                events = [str(event.type) for event in each.events or ()]
                prefill = None if each.prefill_stats is None else asdict(each.prefill_stats)
                if prefill and self.workload.layout:  # an estimate, from the blocks that a window still holds
                    del prefill["num_cache_creation_tokens"]
                if self.workload.sessions:
                    prefill, events = None, []
                error = getattr(each, "error", None)
                refusal = None if error is None else [error.code, error.message]
                told[each.request_id] = [list(each.new_token_ids), reason, each.stop_reason, events, prefill, refusal]
            if outputs.scheduler_stats is not None:
                told["its loggers"] = _logged(outputs.scheduler_stats)
                if self.workload.layout:  # the time of a release is not reported
                    del told["its loggers"][1]
                if self.workload.sessions:  # nor the cache hits of later parts
                    told["its loggers"] = [outputs.scheduler_stats.num_running_reqs, None]
        return dict(sorted(told.items()))

    def _drafts(self, output: Any, result: Any) -> DraftTokenIds:
        """Some drafts, or none, for each row that sampled; the first ones are correct."""
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts: list[list[int]] = []
        for name, run in zip(result.req_ids, result.sampled_token_ids, strict=True):
            unverified = len(output.scheduled_spec_decode_tokens.get(name, ()))
            at = starts[name] + output.num_scheduled_tokens[name] - unverified + len(run)
            rng = random.Random(f"{self.workload.seed} {name} {at} drafts")
            most = min(self.workload.num_drafts, self.limits[name] - at - 1)
            count = rng.randrange(most + 1) if run and most > 0 else 0
            num_right = rng.randrange(count + 1)
            own = [self._sample(name, at + place) for place in range(count)]
            drafts.append([token if place < num_right else NUM_TOKENS + 1 for place, token in enumerate(own)])
        return DraftTokenIds(list(result.req_ids), drafts)

    def _sample(self, name: str, position: int) -> int:
        token = random.Random(f"{self.workload.seed} {name} {position}").randrange(NUM_TOKENS)
        first, stops = self.allowed[name]
        return NUM_TOKENS if token in stops and position < first else token


def spec_of(layout: tuple[str, int, int], max_model_len: int, num_drafts: int = 0) -> Any:
    """A layer of a group."""
    kind, block_size, size = layout
    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    if kind == "full":
        return FullAttentionSpec(block_size=block_size, **sizes)
    if kind == "encoder":
        return CrossAttentionSpec(block_size=block_size, **sizes)
    if kind == "window":
        return SlidingWindowSpec(block_size=block_size, sliding_window=size, **sizes)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=size, **sizes)
    if kind == "prompt and window":
        return RSWASpec(block_size=block_size, rswa_window=size, **sizes)
    if kind == "ring":
        return CircularBufferSpec(block_size=block_size, **sizes)
    state: dict[str, Any] = {"shapes": ((2, 4),), "dtypes": (torch.float32,), "num_speculative_blocks": num_drafts}
    if kind == "state":
        return MambaSpec(block_size=max_model_len, **state)
    within = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if size else {}
    return MambaSpec(block_size=block_size, mamba_cache_mode="align", **within, **state)


def _logged(stats: Any) -> list[Any]:
    work = stats.perf_stats
    return [
        [stats.num_running_reqs, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs],
        round(stats.kv_cache_usage, 9),
        asdict(stats.prefix_cache_stats),
        None if stats.spec_decoding_stats is None else asdict(stats.spec_decoding_stats),
        None if work is None else [work.num_flops_per_gpu, work.num_read_bytes_per_gpu, work.num_write_bytes_per_gpu],
    ]


def configured(base: Any, workload: Workload) -> Any:
    """vLLM's configuration for a workload."""
    config = copy.copy(base)
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.cache_config = copy.copy(base.cache_config)
    config.model_config = copy.copy(base.model_config)
    scheduler = dict(workload.scheduler)
    config.model_config.max_model_len = scheduler.pop("max_model_len")
    config.scheduler_config.max_num_scheduled_tokens = None
    for name, value in scheduler.items():
        setattr(config.scheduler_config, name, value)
    config.scheduler_config.async_scheduling = workload.asynchronous
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.data_parallel_size = 2 if workload.held_by_host else 1
    config.cache_config.block_size = workload.block_size
    config.cache_config.enable_prefix_caching = workload.caches
    has_cached_states = any(kind == "cached state" for kind, _, _ in workload.layout)
    config.cache_config.mamba_cache_mode = "align" if has_cached_states else "none"
    config.cache_config.num_gpu_blocks = workload.num_blocks
    config.lora_config = SimpleNamespace(max_loras=workload.max_loras) if workload.max_loras else None
    if workload.num_drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=workload.num_drafts,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    config.observability_config = copy.copy(base.observability_config)
    config.observability_config.enable_mfu_metrics = workload.seed % 4 == 0
    return config


def own_class(workload: Workload) -> type:
    """The scheduler that vLLM itself would use."""
    return AsyncScheduler if workload.asynchronous else OwnScheduler


def build_sides(base: Any, workload: Workload) -> tuple[Side, Side]:
    """vLLM's own scheduler and ours, configured alike; ours decides as the preset says."""
    config, own = configured(base, workload), own_class(workload)
    config.additional_config = {"pointsman": {"preset": "vllm"}}
    return Side(workload, config, own), Side(workload, config, Scheduler)


def compare(base: Any, workload: Workload, tally: Counter[str]) -> dict[str, Any] | None:
    """Run a workload; the first difference, or None."""
    sides = build_sides(base, workload)
    try:
        return run_both(sides, workload, tally)
    finally:
        for side in sides:
            side.close()


def run_both(sides: tuple[Side, Side], workload: Workload, tally: Counter[str]) -> dict[str, Any] | None:
    """Run both in lockstep; the first difference, or None."""
    arrivals = dict(workload.arrivals)
    names = {request["id"] for requests in arrivals.values() for request in requests}
    ended: set[str] = set()
    for step in range(MAX_STEPS):
        for request in arrivals.pop(step, ()):
            name = request["id"]
            if name in sides[0].added and not sides[0].has(name):  # a part of an aborted session
                continue
            for side in sides:
                side.add(request)
        for side in sides:
            side.compile(workload.compiled.get(step, ()))
        _abort(sides, workload.aborts.get(step), tally)
        if not arrivals and len(ended) >= len(names) and not any(side.scheduler.has_requests() for side in sides):
            break
        interval = workload.scheduler.get("prefill_schedule_interval", 1)
        is_throttled = workload.held_by_host and step % interval != 0
        theirs, ours = (side.schedule(is_throttled) for side in sides)
        _count_held(sides[1], tally)
        if sides[1].lacking:
            return {"step": step, "what": sides[1].lacking, "theirs": theirs, "ours": ours}
        if any(workload.encoder):
            tally["inputs computed"] += sum(map(len, theirs["encoder inputs"].values()))
            tally["freed"] += len(sides[0].freed)
            tally["freed otherwise"] += sides[0].freed != sides[1].freed
        if theirs == ours and (difference := _reads_differ(sides, step, tally)):
            return difference
        if theirs != ours:
            has_images = any(workload.encoder) and not workload.is_encoder_decoder
            if sides[0].lacking:  # see the module's docstring
                tally["theirs lacks embeddings"] += 1
                return None
            if has_images and _takes_less_behind_a_victim(sides, theirs, ours):
                tally["less behind a victim"] += 1
                return None
            if has_images and _goes_further(sides, theirs, ours):
                tally["went further"] += 1
                return None
            if has_images and _lacks_blocks_to_go_further(sides, theirs, ours):
                tally["lacked blocks to go further"] += 1
                return None
            if has_images and _keeps_others(sides, theirs, ours):
                tally["kept others"] += 1
                return None
            if not workload.scheduler["enable_chunked_prefill"] and _resumes_in_chunks(sides[1], theirs, ours):
                tally["resumed in chunks"] += 1
                return None
            if workload.layout and _may_do_more(workload) and _does_more(theirs, ours):
                tally["did more"] += 1
                return None
            if workload.asynchronous and _resumes_a_block_later(workload, theirs, ours):
                tally["resumed a block later"] += 1
                return None
            if _may_find_otherwise(workload):
                tally["found otherwise"] += 1
                return None
            if not (workload.layout or workload.sessions) and _finds_what_is_generated(sides[0], theirs, ours):
                tally["found what is generated"] += 1
                return None
            if workload.num_drafts and (_gives_up_drafts(theirs, ours) or _starts_without_placeholders(theirs, ours)):
                tally["gave up drafts"] += 1
                return None
            what = [key for key in theirs if theirs[key] != ours[key]]
            return {"step": step, "what": what, "theirs": theirs, "ours": ours}
        _count(theirs, tally)
        ended.update(theirs["finished"])
        ended.update(name for name in workload.sessions if name in sides[0].added and not sides[0].has(name))
        _abort(sides, workload.late_aborts.get(step), tally)
        if len(sides[0].in_flight) < 1 + workload.asynchronous and theirs["tokens"]:
            continue
        theirs, ours = (side.update() for side in sides)
        if theirs != ours:
            which = [name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)]
            told = [{name: each.get(name) for name in which} for each in (theirs, ours)]
            return {"step": step, "what": ["told"], "theirs": told[0], "ours": told[1]}
        if difference := _reads_differ(sides, step, tally):
            return difference
        tally["with work"] += theirs["its loggers"][-1] is not None
        told_of = [told for name, told in theirs.items() if name in names]
        reasons = [told[1] for told in told_of]
        tally["stopped"] += reasons.count("stop")
        tally["refused"] += reasons.count("error")
        tally["told without blocks"] += sum(workload.caches and _has_no_blocks(told[4]) for told in told_of)
    else:
        return {"step": step, "what": ["never ends"], "theirs": len(ended), "ours": len(names)}
    return None


def _has_no_blocks(prefill: dict[str, Any] | None) -> bool:
    """Whether a preempted request got its first output: none of its prompt then counts as cached."""
    if not prefill or "num_cache_creation_tokens" not in prefill:
        return False
    return prefill["num_computed_tokens"] >= 8 and not prefill["num_cache_creation_tokens"]


def _reads_differ(sides: tuple[Side, Side], step: int, tally: Counter[str]) -> dict[str, Any] | None:
    """The first difference in the attributes of the two that others read, in some workloads, or None."""
    if sides[0].workload.seed % 3:
        return None
    theirs, ours = (side.reads() for side in sides)
    tally["reads"] += len(theirs)
    which = [name for name in theirs if theirs[name] != ours.get(name)]
    if not which:
        return None
    return {"step": step, "what": which, "theirs": theirs, "ours": ours}


def _may_do_more(workload: Workload) -> bool:
    """Whether ours may run more: it has more blocks; or steps run ahead, and vLLM's own lets a request wait a step
    longer for another request's state. See the module's docstring."""
    caches_states = any(kind == "cached state" for kind, _, _ in workload.layout)
    return not workload.is_strict or (workload.asynchronous and caches_states)


def _may_find_otherwise(workload: Workload) -> bool:
    """Whether other prefixes may be found than in vLLM's own, because generated tokens become findable later: see docs.
    The tokens to compute then differ."""
    finds = workload.caches or workload.num_drafts > 0
    return bool(workload.layout) and finds and not workload.is_strict


def _resumes_in_chunks(side: Side, theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether they differ in that ours resumes a request that fits the step in part; see the module's docstring."""
    more = [name for name in ours["tokens"] if name not in theirs["tokens"]]
    same = theirs["tokens"].items() <= ours["tokens"].items() and theirs["preempted"] == ours["preempted"]
    # Workers of the second runner get a resumed request as a new one.
    return same and bool(more) and side.scheduler.requests[more[0]].num_preemptions > 0


def _resumes_a_block_later(workload: Workload, theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether they differ in that ours finds tokens in flight before a preemption; see the module's docstring."""
    later = [ours["starts"][name] - theirs["starts"].get(name, 0) for name in ours["resumed"]]
    others = [name for name in theirs["tokens"] if name not in ours["resumed"]]
    same = all(ours["tokens"].get(name) == theirs["tokens"][name] for name in others)
    return theirs["resumed"] == ours["resumed"] and same and workload.block_size == max(later, default=0)


def _keeps_others(sides: tuple[Side, Side], theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether they differ in that one recomputes embeddings that the other has kept; see the module's docstring."""
    if {**theirs, "encoder inputs": None} != {**ours, "encoder inputs": None}:
        return False
    computed = [_computed(sides[0], theirs), _computed(sides[1], ours)]
    kept = [side.embeddings_before for side in sides]
    return computed[0] - computed[1] <= kept[1] and computed[1] - computed[0] <= kept[0]


def _computed(side: Side, decision: dict[str, Any]) -> set[str]:
    """The identifiers of the inputs that a step computes."""
    inputs = decision["encoder inputs"].items()
    return {side.images[name][index].identifier for name, indices in inputs for index in indices}


def _takes_less_behind_a_victim(sides: tuple[Side, Side], theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether they differ in that rows with images get no tokens, or no embedding space, from a request that is
    preempted before; see the module's docstring."""
    other = theirs.keys() - {"tokens", "starts", "encoder inputs", "preempted"}
    if not theirs["preempted"] or any(theirs[name] != ours[name] for name in other):
        return False
    if not set(ours["preempted"]) <= set(theirs["preempted"]):  # these rows ask for blocks in theirs alone
        return False
    starts = {name: start for name, start in ours["starts"].items() if name not in theirs["preempted"]}
    if not starts.items() <= theirs["starts"].items():
        return False
    fewer = [name for name, count in theirs["tokens"].items() if ours["tokens"].get(name, 0) < count]
    return bool(fewer) and all(sides[1].images[name] for name in fewer)


def _goes_further(sides: tuple[Side, Side], theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether the first row that differs continues in ours where theirs ends before an image. Ours has kept the image's
    embeddings, or the row reads none of them yet, or theirs lacks space or budget for them because it recomputes others
    that ours has kept. See the module's docstring."""
    if theirs["preempted"] != ours["preempted"] or theirs["finished"] != ours["finished"]:
        return False
    for name, count in ours["tokens"].items():
        before = theirs["tokens"].get(name, 0)
        if count == before:
            continue
        end = ours["starts"][name] + before
        for feature in sides[1].images[name]:
            at = feature.mm_position
            if at.offset <= end < at.offset + at.length and before < count:
                reads = at.is_embed[end - at.offset : end - at.offset + count - before].any()
                again = _computed(sides[0], theirs) - _computed(sides[1], ours)
                kept = {feature.identifier, *again} & sides[1].embeddings_before
                return not reads or bool(kept) or _holds_unread(sides)
        return False
    return False


def _lacks_blocks_to_go_further(sides: tuple[Side, Side], theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether they differ in that ours lacks blocks for a request's first chunk and does not admit it, while the chunk
    in theirs ends before an image whose embeddings ours has kept; see the module's docstring."""
    if theirs["preempted"] != ours["preempted"] or theirs["finished"] != ours["finished"]:
        return False
    same = [name for name in ours["tokens"] if ours["tokens"][name] == theirs["tokens"].get(name)]
    left = [name for name in theirs["tokens"] if name not in ours["tokens"]]
    admitted = {*theirs["new"], *theirs["resumed"]}
    if len(same) < len(ours["tokens"]) or not left or left[0] not in admitted:
        return False
    end = theirs["starts"][left[0]] + theirs["tokens"][left[0]]
    features = sides[0].images[left[0]]
    kept = {f.identifier for f in features if f.mm_position.offset == end} & sides[1].embeddings_before
    lacks = sides[1].scheduler.core.explain(left[0]).reason
    return bool(kept) and lacks in (Reason.BLOCKS, Reason.WATERMARK)


def _holds_unread(sides: tuple[Side, Side]) -> bool:
    """Whether theirs holds embeddings for a row that reads none of them yet."""
    held = {key for key, users in sides[0].scheduler.encoder_cache_manager.cached.items() if users}
    encoder = sides[1].scheduler.core._encoder
    ours = {item.key for request in encoder.holders() for item in encoder.holds(request)}
    masks = {f.identifier: f.mm_position.is_embed for features in sides[0].images.values() for f in features}
    return any(not masks[key].all() for key in held - ours if key in masks)


def _gives_up_drafts(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether they differ in that ours verifies fewer drafts when blocks run out; see the module's docstring."""
    kept = [name for name in ours["tokens"] if name in theirs["tokens"]]
    fewer = [name for name in kept if len(ours["drafts"].get(name, ())) < len(theirs["drafts"].get(name, ()))]
    return bool(fewer) or bool(theirs["preempted"])


def _starts_without_placeholders(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether the first request that only ours admits starts with one token and no placeholders; in theirs it waits for
    the placeholders' blocks. See the module's docstring."""
    more = [name for name in ours["tokens"] if name not in theirs["tokens"]]
    same = all(ours["tokens"][name] == count for name, count in theirs["tokens"].items() if name in ours["tokens"])
    return same and bool(more) and ours["tokens"][more[0]] == 1 and not ours["drafts"].get(more[0])


def _finds_what_is_generated(side: Side, theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether the first request that differs begins with tokens that a running request of theirs generated. Ours finds
    them only after that request has released its blocks. See the module's docstring."""
    for name in theirs["new"]:
        start = theirs["starts"][name]
        if start == ours["starts"].get(name):
            continue
        prompt = side.scheduler.requests[name].prompt_token_ids[:start]
        return start > ours["starts"].get(name, 0) and any(
            start > other.num_prompt_tokens and other.all_token_ids[:start] == prompt
            for other in side.scheduler.running
            if other.request_id != name
        )
    return False


def _does_more(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether ours runs everything that theirs does, and preempts no other request: it releases the blocks behind all
    windows before it preempts a row."""
    return theirs["tokens"].items() <= ours["tokens"].items() and set(ours["preempted"]) <= set(theirs["preempted"])


def _abort(sides: tuple[Side, Side], names: list[str] | None, tally: Counter[str]) -> None:
    if names:
        tally["aborts"] += sum(name in sides[0].scheduler.requests for name in names)
        for side in sides:
            side.abort(names)


def _count_held(side: Side, tally: Counter[str]) -> None:
    """Count the steps that hold prompts back, and those that do not although it is early, because of a backlog."""
    if isinstance(side.scheduler, Scheduler) and (interval := side.scheduler.core._parts.gates.interval) is not None:
        tally["held"] += interval.held_last
        waits = any(each.reason is Reason.PREFILL_INTERVAL for each in map(side.scheduler.core.explain, _waiting(side)))
        tally["held back"] += waits


def _waiting(side: Side) -> list[str]:
    return [request.request_id for request in side.scheduler.core.waiting]


def _count(decision: dict[str, Any], tally: Counter[str]) -> None:
    tokens, starts = decision["tokens"], decision["starts"]
    tally["steps"] += 1
    tally["rows"] += len(tokens)
    tally["preemptions"] += len(decision["preempted"])
    tally["resumed"] += len(decision["resumed"])
    tally["hits"] += sum(starts.get(name, 0) > 0 for name in decision["new"])
    tally["chunks"] += sum(count > 1 and starts.get(name, 0) > 0 for name, count in tokens.items())
    tally["empty"] += not tokens
    tally["drafts"] += sum(map(len, decision["drafts"].values()))


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    init_none_hash(HASH)
    base = build_config(Settings(num_blocks=100, max_model_len=1 << 12, max_num_seqs=8, max_num_batched_tokens=1 << 12))
    tally: Counter[str] = Counter()
    differences = []
    kind = next(iter(sys.argv[3:]), "")
    workloads = [make_workload(seed, kind) for seed in range(first, first + count)]
    workloads += [make_shared(number) for number in range(first, first + count // 4)] if kind == "groups" else []
    workloads += [make_preempted(number) for number in range(first, first + count // 4)] if not kind else []
    for workload in workloads:
        try:
            found = compare(base, workload, tally)
        except Exception as error:
            found = {"what": [f"{type(error).__name__}: {error}"]}
            if count == 1:
                raise
        tally["asynchronous"] += workload.asynchronous
        tally["with adapters"] += workload.max_loras > 0
        tally["with drafts"] += workload.num_drafts > 0
        tally["sessions"] += len(workload.sessions)
        tally["grammars"] += sum(map(len, workload.compiled.values()))
        if found is not None:
            names = (
                "num_blocks",
                "block_size",
                "caches",
                "asynchronous",
                "max_loras",
                "num_drafts",
                "layout",
                "hash_size",
                "retention",
                "encoder",
            )
            settings = {name: getattr(workload, name) for name in names} | workload.scheduler
            differences.append({"seed": workload.seed, **found, "settings": settings})
    print(json.dumps({"tally": tally, "differences": differences}))


if __name__ == "__main__":
    main()
