"""Draws random configurations, requests and operations, for Hypothesis and for a seeded driver.

Everything random goes through a `Chooser`, so the state machine (which shrinks) and the seeded driver (which is
fast, and the same in every run) try the same things.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from pointsman.core import EncoderInput, Request, SchedulerConfig

from .shadow import EOS

T = TypeVar("T")

ADAPTERS: tuple[tuple[str, int | str], ...] = (("a", 0), ("b", 0), ("a", 1), ("c", "0"))
"""Adapters whose names are also salts, and two versions of one adapter."""
IMAGE_SIZES = {"p": 0, "q": 0, "r": 2, "s": 4}
"""Number of embeddings of each image; 0: one for each placeholder."""
MASKS = {"q": {3: "010", 5: "00110"}}
"""For some numbers of placeholders of an image: the placeholders that the model reads as embeddings; for other numbers
all placeholders."""
Image = tuple[str, int, int]
"""An image in a prompt: its name, the text before the image, and its placeholders."""
EVICTIONS = ("lru", "lru", "retention:share=0.6", "reuse")
MAX_LIVE = 10  # requests alive at once; more makes runs slower and finds nothing new in pools of 12 blocks


class Chooser(Protocol):
    """A source of choices, each of which shrinks towards its first or smallest value."""

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""

    def chance(self, percent: int) -> bool:
        """True in about `percent` of cases."""


class SeededChooser:
    """Choices from a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return options[self._random.randrange(len(options))]

    def chance(self, percent: int) -> bool:
        return self._random.randrange(100) >= 100 - percent


class DrawChooser:
    """Choices that Hypothesis draws, and shrinks."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        value: int = self._draw(st.integers(low, high))
        return value

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent


# ------------------------------------------------------------------------------- configurations


def make_config(choose: Chooser, **overrides: Any) -> SchedulerConfig:
    """A configuration with a pool and budgets so small that every limit is met all the time."""
    block_size = choose.integer(1, 4)
    reserved = choose.integer(0, 2)
    max_num_seqs = choose.integer(1, 5)
    chunked = not choose.chance(25)
    caching = not choose.chance(20)
    order = choose.choice(("fcfs", "priority", "fcfs", "priority", "fcfs-front", "priority-by-arrival"))
    num_draft_tokens = choose.choice((0, 0, 1, 2, 5))
    spare = choose.integer(0, 14)  # of the budget, sometimes too small for all drafts
    of_each = 1 if spare % 3 == 2 else 1 + num_draft_tokens
    values: dict[str, Any] = {
        "block_size": block_size,
        "num_reserved_blocks": reserved,
        "num_blocks": reserved + choose.integer(1, 12),
        "max_model_len": choose.integer(4, 48),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs * of_each + spare,
        "num_draft_tokens": num_draft_tokens,
        "draft_table": choose.choice(((), ((2, 1),), ((1, 0), (3, 1)))) if num_draft_tokens else (),
        "max_steps_in_flight": choose.integer(1, 3),
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": choose.choice((0, 0, 1, 2, 4)) if chunked else 0,
        "enable_prefix_caching": caching,
        "share_within_step": not (caching and choose.chance(25)),
        "order": order,
        "victim": choose.choice((None, "latest", "lowest-priority")),
        "watermark": choose.choice((0.0, 0.0, 0.1, 0.35)),
        "decode_reserve": choose.choice((0, 0, 0, 0, 1, 9, "mean")),
        "log_request_events": choose.chance(30),
        "count_common_prefix": choose.chance(40),
        "enable_kv_cache_events": choose.chance(40),
        "full_sequence_must_fit": not choose.chance(45),
        "batching": choose.choice(("mixed",) * 6 + ("static", "prefill-first")),
        "shortage": choose.choice(("in-order", "look-ahead")) if choose.chance(25) else "replan",
        "first_chunk_only": choose.chance(12),
        "admission_charge": choose.choice(("whole-fits", "whole")) if choose.chance(15) else "uncached",
        "count_owed_blocks": not choose.chance(15),
        "admit_after_preemption": choose.chance(12),
        "max_loras": choose.choice((0, 0, 1, 2)),
        "reserves": choose.choice(((),) * 5 + (("bypass:bound=2",), ("bypass:bound=4,kept=0", "watermark:share=0.1"))),
    }
    # Not a separate choice, so that a seed makes the same choices as before there were evictions.
    values["eviction"] = EVICTIONS[(values["num_blocks"] + values["max_model_len"]) % len(EVICTIONS)]
    if choose.chance(25):
        values["max_num_active_seqs"] = choose.integer(1, max_num_seqs)
    if choose.chance(35):
        values |= {"encoder_budget": choose.integer(2, 9), "encoder_cache_size": choose.integer(2, 9)}
    return SchedulerConfig(**_with_effect({**values, **overrides}, overrides, choose))


def _with_effect(values: dict[str, Any], overrides: dict[str, Any], choose: Chooser) -> dict[str, Any]:
    """Remove knobs that have no effect in a configuration, and add knobs that only some configurations allow."""
    if "max_num_seqs" in overrides:
        values["max_num_active_seqs"] = overrides.get("max_num_active_seqs")
    too_long = values["long_prefill_token_threshold"] >= values["max_num_batched_tokens"]
    if too_long or not values["enable_chunked_prefill"]:
        values["long_prefill_token_threshold"] = 0
    if not values["num_draft_tokens"]:
        values["draft_table"] = overrides.get("draft_table", ())
    values["count_common_prefix"] &= values["enable_prefix_caching"]
    values["enable_kv_cache_events"] &= values["enable_prefix_caching"]
    if not values["enable_prefix_caching"]:
        values["eviction"] = "lru"
        values.pop("preemption_mode", None)
    if values.get("encoder_budget") and values["batching"] == "prefill-first":
        if "encoder_budget" in overrides:
            values["batching"] = "mixed"
        else:
            values["encoder_budget"] = values["encoder_cache_size"] = 0
    if values["batching"] != "mixed":
        values["admit_after_preemption"] = False
    if not values["full_sequence_must_fit"]:
        values["count_owed_blocks"] = True
    if values["order"] == "priority" and values["batching"] == "mixed":
        values["displace"] = overrides.get("displace", choose.choice((None, False, True)))
    if values["batching"] == "prefill-first":
        if values["shortage"] == "replan":
            values["shortage"] = choose.choice(("in-order", "look-ahead"))
        seats = values["max_num_seqs"]
        active = choose.choice((None, seats, seats + 2, 1000))
        values["max_num_active_seqs"] = overrides.get("max_num_active_seqs", active)
        if values["enable_chunked_prefill"] and choose.chance(30):  # a budget smaller than max_num_seqs
            values["max_num_batched_tokens"] = overrides.get("max_num_batched_tokens", choose.integer(1, seats))
            values["long_prefill_token_threshold"] = 0
    if values["long_prefill_token_threshold"]:
        values.setdefault("long_prefill_token_threshold_adaptive", choose.chance(40))
    else:
        values["long_prefill_token_threshold_adaptive"] = False
    if values["batching"] == "mixed" and values["num_draft_tokens"] and not values["draft_table"]:
        values.setdefault("pad_first_decodes", values["max_num_batched_tokens"] % 2 == 1)
    if values["batching"] != "prefill-first":
        values["max_num_batched_tokens"] = max(values["max_num_batched_tokens"], values["max_num_seqs"])
    if values["enable_chunked_prefill"]:
        values.setdefault("max_num_partial_prefills", choose.choice((None, None, None, 1, 2, 3)))
        if values["long_prefill_token_threshold"] and values["max_num_partial_prefills"] != 1 and choose.chance(40):
            values.setdefault("max_long_partial_prefills", 1)
    capped = values.get("max_num_partial_prefills") or values.get("max_long_partial_prefills")
    if values["max_loras"] or values.get("encoder_budget") or capped:
        values.setdefault("max_overtakes", choose.choice((0, 1, 3)))
    values.setdefault("own_preemption_ends_step", values["max_model_len"] % 2 > 0)  # no separate choices
    if values["batching"] == "mixed" and "batching" not in overrides:
        values.setdefault("prefill_interval", (4, 2, 1, 1, 1, 1, 1, 1)[values["max_model_len"] % 8])
    if values.get("encoder_budget"):
        values.setdefault("split_encoder_inputs", (False, True, "begun")[values["max_model_len"] % 3])
        values.setdefault("encoder_blocks_queue", values["max_model_len"] % 5 == 0)
        values.setdefault("keep_embeddings", values["max_model_len"] % 4 > 0)
    return values


def make_connector_seed(choose: Chooser, overrides: dict[str, Any]) -> int | None:
    """The seed of a connector, or None for no connector, as `overrides` say under "connector"; this key is removed from
    `overrides`.

    A connector wants a pool that holds more than one request of full length, or nothing may be held outside the batch.
    """
    if not overrides.pop("connector", choose.chance(30)):
        overrides.pop("preemption_mode", None)
        return None
    overrides.setdefault("kv_load_failure_policy", choose.choice(("recompute", "recompute", "fail")))
    overrides.setdefault("kv_load_timeout", choose.choice((None, None, 1.5)))
    overrides.setdefault("preemption_mode", choose.choice(("recompute", "swap", "cheaper")))
    if not choose.chance(20):
        overrides.setdefault("max_model_len", choose.integer(4, 16))
        overrides.setdefault("num_blocks", choose.integer(8, 18))
    return choose.integer(0, 1 << 20)


# ------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The parts of a request. A prompt is a prefix of a shared document and a tail of its own."""

    document: int = 0
    shared: int = 0
    tail: tuple[int, ...] = (1,)
    continues: int | None = None
    """Index of an earlier conversation whose tokens begin the prompt (the next turn of a chat), or None."""
    arrival: int = 0
    max_tokens: int = 1
    max_total_tokens: int | None = None
    min_tokens: int = 0
    priority: int = 0
    eos: tuple[int, ...] = ()
    ignore_eos: bool = False
    stops: tuple[int, ...] = ()
    repetition: tuple[int, int, int] | None = None
    """Maximum and minimum pattern size, and the number of repetitions that ends the request; None: no repetition
    detection."""
    salt: str | None = None
    adapter: tuple[str, int | str] | None = None
    images: tuple[Image, ...] = ()
    """Images of the request; images that do not fit the prompt are dropped."""
    use_prefix_cache: bool = True
    runs_ahead: bool = True
    more_input: bool = False
    reuses_id: bool = False
    """Whether the request reuses the id of a request whose end has been reported, if there is one."""
    preloaded: bool = False
    """Whether the connector, if there is one, holds the KV of the request's prompt."""
    park: str | None = None
    """Reason for which the request is parked when it is added, or None."""

    def build(self, request_id: str, conversations: Sequence[Sequence[int]], longest: int) -> Request:
        """The request, with a prompt of at most `longest` tokens."""
        prompt = list(document(self.document)[: self.shared])
        if self.continues is not None and conversations:
            prompt = list(conversations[self.continues % len(conversations)])
        prompt = (prompt + list(self.tail))[:longest]
        inputs = place_images(self.images, prompt)
        names = ("max_pattern_size", "min_pattern_size", "min_count")
        repetition = dict(zip(names, self.repetition, strict=True)) if self.repetition else None
        return Request(
            request_id, prompt, arrival_time=float(self.arrival), max_tokens=self.max_tokens,
            max_total_tokens=self.max_total_tokens, min_tokens=self.min_tokens, priority=self.priority,
            eos_token_ids=self.eos, ignore_eos=self.ignore_eos, stop_token_ids=self.stops, cache_salt=self.salt,
            adapter=self.adapter, encoder_inputs=inputs, use_prefix_cache=self.use_prefix_cache,
            skip_reading_prefix_cache=self.arrival % 11 == 5, runs_ahead=self.runs_ahead,
            more_input=self.more_input, repetition_detection=repetition,
            tenant=f"tenant {self.document % 3}", ttft_target=float(self.arrival % 7) or None,
            retention=(None, 0.0, 2.0, 5.0, 20.0, 1000.0)[self.arrival % 6],
        )  # fmt: skip


def place_images(images: Sequence[Image], tokens: list[int]) -> list[EncoderInput]:
    """The encoder inputs of the images that fit `tokens`; tokens at placeholders become zeros."""
    inputs: list[EncoderInput] = []
    end = 0
    for name, gap, length in images:
        start, end = end + gap, end + gap + length
        if end > len(tokens):
            break
        mask = MASKS.get(name, {}).get(length)
        inputs.append(EncoderInput(name, start, length, IMAGE_SIZES[name] or None, mask))
        tokens[start:end] = [0] * length
    return inputs


def document(index: int) -> tuple[int, ...]:
    """40 tokens over an alphabet of two; documents share their first five tokens."""
    return (0, 1, 1, 0, 1, *((position * position + index * (position + 1)) // 2 % 2 for position in range(35)))


def make_request_spec(choose: Chooser, config: SchedulerConfig) -> RequestSpec:
    """A random request. Most random requests fit the pool; the other ones test refusals."""
    room = min(config.max_model_len - 1, config.num_usable_tokens)
    if not config.enable_chunked_prefill:
        room = min(room, config.max_num_batched_tokens)
    longest = room + 3 if choose.chance(6) else max(1, room)
    total = choose.integer(1, min(longest, choose.choice((4, 8, longest))))
    tail = min(total, choose.choice((1, 1, 2, 3, 6)))
    max_tokens = 0 if choose.chance(10) else choose.integer(1, choose.choice((3, 10, 25, 40)))
    return RequestSpec(
        document=choose.integer(0, 2),
        shared=total - tail,
        tail=tuple(choose.integer(0, 3) for _ in range(tail)),
        continues=choose.integer(0, 20) if choose.chance(20) else None,
        arrival=choose.integer(0, 9),
        max_tokens=max_tokens,
        max_total_tokens=choose.integer(1, 30) if choose.chance(20) else None,
        min_tokens=choose.integer(0, max_tokens) if choose.chance(25) else 0,
        priority=choose.integer(-1, 2),
        eos=choose.choice(((), (), (EOS,), (EOS, 3))),
        ignore_eos=choose.chance(20),
        stops=choose.choice(((), (), (4,), (4, 2))),
        repetition=choose.choice(((1, 1, 2), (2, 0, 2), (3, 2, 2), (4, 0, 3))) if choose.chance(30) else None,
        salt=choose.choice((None, None, None, "a", "b")),
        adapter=choose.choice(ADAPTERS) if choose.chance(60 if config.max_loras else 3) else None,
        images=make_images(choose, config),
        use_prefix_cache=not choose.chance(10),
        runs_ahead=not choose.chance(15),
        more_input=choose.chance(12),
        reuses_id=choose.chance(15),
        preloaded=choose.chance(40),
        park=choose.choice(("grammar", "remote_kvs", "streaming_req")) if choose.chance(8) else None,
    )


def make_images(choose: Chooser, config: SchedulerConfig) -> tuple[Image, ...]:
    """The images of a random request: usually some if there is an encoder, and none otherwise."""
    if not choose.chance(60 if config.encoder_budget else 3):
        return ()
    names = tuple(IMAGE_SIZES)
    return tuple(
        (choose.choice(names), choose.choice((0, 0, 1, 3)), choose.choice((1, 2, 3, 5)))
        for _ in range(choose.integer(1, 4))
    )
