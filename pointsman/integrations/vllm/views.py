"""Views: the attributes of vLLM's scheduler that loggers, plugins and tests read, such as `scheduler.running` or the
state of a request.

Each value is computed from the core when the attribute is read, and is valid until the next call of the scheduler. So
steps do no work for these attributes. The attributes cannot be set, because the core would not notice the change.

When a request of vLLM's is queued, its class is replaced by a subclass whose properties read the core's request. Once
the request has finished, the attributes of vLLM's class are used again, and hold the final state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.v1.request import RequestStatus

from pointsman.core import Request
from pointsman.core import RequestStatus as Status
from pointsman.core import Scheduler as Core

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request as VLLMRequest

_STATUS = {
    Status.WAITING: RequestStatus.WAITING,
    Status.WAITING_FOR_GRAMMAR: RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    Status.WAITING_FOR_REMOTE_KVS: RequestStatus.WAITING_FOR_REMOTE_KVS,
    Status.WAITING_FOR_STREAMING_REQ: RequestStatus.WAITING_FOR_STREAMING_REQ,
    Status.RUNNING: RequestStatus.RUNNING,
    Status.PREEMPTED: RequestStatus.PREEMPTED,
}


@dataclass(frozen=True, slots=True)
class Source:
    """The objects from which the state of vLLM's requests is read.

    Args:
        core: the core's scheduler.
        of_id: the core's requests by vLLM's ids.
        has_placeholders: whether vLLM's own scheduler would count samples in flight as placeholders: under asynchronous
            scheduling.
    """

    core: Core
    of_id: Mapping[str, Request]
    has_placeholders: bool


class _Live:
    """Base class that precedes vLLM's request class; its properties read the state of the request from the core."""

    request_id: str
    _all_token_ids: list[int]
    _output_token_ids: list[int]
    use_structured_output: bool
    append_output_token_ids: Any

    def _ours(self) -> Request | None:
        """The core's request; None: the request has finished, or waits for the next part of its prompt."""
        ours = self._source().of_id.get(self.request_id)
        return ours if ours is not None and ours.metadata is self else None

    def _source(self) -> Source:
        source: Source = vars(self)["_pointsman"]
        return source

    def _update_token_lists(self) -> None:
        """Update vLLM's lists of tokens. For a request with a grammar these lists are always up to date."""
        if self.use_structured_output:
            return
        ours = self._ours()
        if ours is None:
            ended_with = vars(self).pop("_ended_with", None)
            if ended_with is not None:
                self.append_output_token_ids(ended_with[len(self._output_token_ids) :].tolist())
        elif (more := ours.num_tokens - len(self._all_token_ids)) > 0:
            self.append_output_token_ids(ours.all_token_ids[-more:].tolist())

    def _refuse_write(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"{name} of request {self.request_id!r} is decided by Pointsman's scheduler, and cannot be set to "
            f"{value!r}: call finish_requests to end the request"
        )

    @property
    def status(self) -> RequestStatus:
        ours = self._ours()
        return vars(self)["status"] if ours is None else _STATUS.get(ours.status, vars(self)["status"])

    @status.setter
    def status(self, value: Any) -> None:
        self._refuse_write("status", value)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV exists when all steps in flight have been executed."""
        ours = self._ours()
        return int(vars(self)["num_computed_tokens"] if ours is None else ours.num_computed_tokens)

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if value != self.num_computed_tokens:  # vLLM's KV manager sets the value that is current anyway
            self._refuse_write("num_computed_tokens", value)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions for all causes."""
        ours = self._ours()
        return int(vars(self)["num_preemptions"] + (0 if ours is None else ours.num_preemptions))

    @num_preemptions.setter
    def num_preemptions(self, value: int) -> None:
        self._refuse_write("num_preemptions", value)

    @property
    def num_output_placeholders(self) -> int:
        """Number of tokens that steps in flight sample, under asynchronous scheduling; 0 while the request does not
        run."""
        ours = self._ours()
        return 0 if ours is None or ours.row is None or not self._source().has_placeholders else ours.num_pending

    @num_output_placeholders.setter
    def num_output_placeholders(self, value: int) -> None:
        self._refuse_write("num_output_placeholders", value)

    @property
    def spec_token_ids(self) -> list[int]:
        """Drafts for the request's next step, as a new list."""
        ours = self._ours()
        return [] if ours is None else self._source().core.waiting_drafts(ours.request_id)

    @spec_token_ids.setter
    def spec_token_ids(self, value: list[int]) -> None:
        self._refuse_write("spec_token_ids", value)

    @property
    def is_prefill_chunk(self) -> bool:
        """Whether, after the newest step that computes tokens of the request, some of its known tokens are still not
        computed."""
        ours = self._ours()
        if ours is None or ours.num_tokens + ours.num_pending != ours.num_admitted_tokens:
            return False
        return ours.num_preemptions > 0 if ours.row is None else ours.num_computed_tokens < ours.num_tokens

    @is_prefill_chunk.setter
    def is_prefill_chunk(self, value: bool) -> None:
        self._refuse_write("is_prefill_chunk", value)

    @property
    def num_tokens(self) -> int:
        self._update_token_lists()
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        self._update_token_lists()
        return len(self._output_token_ids)

    @property
    def output_token_ids(self) -> Any:
        """The output tokens, as vLLM's read-only list."""
        self._update_token_lists()
        return vars(self)["output_token_ids"]

    @property
    def all_token_ids(self) -> Any:
        """The tokens of prompt and output, as vLLM's read-only list."""
        self._update_token_lists()
        return vars(self)["all_token_ids"]


@cache
def _live_class(of_vllm: type[VLLMRequest]) -> Any:
    return type(of_vllm.__name__, (_Live, of_vllm), {"__module__": of_vllm.__module__})


def show_core_state(request: VLLMRequest, source: Source) -> None:
    """Make a queued request of vLLM's show the state of the core's request from now on."""
    if not isinstance(request, _Live):
        vars(request)["_pointsman"] = source
        kind: Any = type(request)
        request.__class__ = _live_class(kind)


def set_status(request: VLLMRequest, status: RequestStatus) -> None:
    """Set the status that a request of vLLM's shows while the core has no request for it."""
    vars(request)["status"] = status


def keep_final_state(request: VLLMRequest, ours: Request, *, tokens: bool) -> None:
    """Keep the final state of the core's request, which has finished and is dropped; `tokens`: whether to keep the
    request's tokens too."""
    values = vars(request)
    values["num_computed_tokens"] = ours.num_computed_tokens if tokens else 0
    values["num_preemptions"] += ours.num_preemptions
    if tokens and not request.use_structured_output:
        values["_ended_with"] = ours.output_token_ids


class ReadOnly:
    """An attribute of the scheduler that is computed when it is read, and cannot be set.

    Args:
        read: computes the value from the scheduler.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, scheduler: Any, owner: type) -> Any:
        return self if scheduler is None else self._read(scheduler)

    def __set__(self, scheduler: Any, value: Any) -> NoReturn:
        raise AttributeError(
            f"{self._name} of Pointsman's scheduler is read-only, and cannot be set to {value!r}: start vLLM with "
            "other options, or construct another scheduler"
        )


class ReadOnlyList(list["VLLMRequest"]):
    """A snapshot of requests, in order; supports the reading methods of vLLM's `RequestQueue`."""

    def peek_request(self) -> VLLMRequest:
        """The first request of the list.

        Raises:
            IndexError: the list is empty.
        """
        if not self:
            raise IndexError("no request waits")
        return self[0]

    def _refuse_write(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "the requests of Pointsman's scheduler are read-only here: call add_request, finish_requests or "
            "set_pause_state of the scheduler"
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse_write
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_write
    add_request = pop_request = prepend_request = prepend_requests = remove_request = remove_requests = _refuse_write


class ReadOnlyDict(Mapping[str, "VLLMRequest"]):
    """vLLM's unfinished requests, by id; always current."""

    def __init__(self, requests: Mapping[str, VLLMRequest]) -> None:
        self._requests = requests

    def __getitem__(self, name: str) -> VLLMRequest:
        return self._requests[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __repr__(self) -> str:
        return repr(self._requests)

    def _refuse_write(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "the requests of Pointsman's scheduler are read-only here: call add_request or finish_requests of the "
            "scheduler"
        )

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = _refuse_write


class BlockPoolView:
    """A read-only stand-in for vLLM's `BlockPool`, used if the core owns the blocks."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.num_gpu_blocks = core.config.num_blocks
        self.enable_caching = core.config.enable_prefix_caching

    def get_num_free_blocks(self) -> int:
        """Number of blocks that no request holds, including cached blocks."""
        return self._core.stats().num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks that requests hold."""
        return self._core.kv_cache_usage


class KVCacheManagerView:
    """A read-only stand-in for vLLM's `KVCacheManager`, used if the core owns the blocks.

    Args:
        core: the core's scheduler.
        kv_cache_config: vLLM's `KVCacheConfig`.
        block_size: number of tokens in a block.
        of_id: the core's requests by vLLM's ids.
    """

    def __init__(
        self, core: Core, kv_cache_config: KVCacheConfig, block_size: int, of_id: Mapping[str, Request]
    ) -> None:
        self._core = core
        self._of_id = of_id
        self.kv_cache_config = kv_cache_config
        self.max_model_len = core.config.max_model_len
        self.enable_caching = core.config.enable_prefix_caching
        self.block_pool = BlockPoolView(core)
        managers = [
            SimpleNamespace(block_size=block_size, kv_cache_spec=group.kv_cache_spec)
            for group in kv_cache_config.kv_cache_groups
        ]
        self.num_kv_cache_groups = len(managers)
        self.coordinator = SimpleNamespace(single_type_managers=managers, block_pool=self.block_pool)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self._core.kv_cache_usage

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The block table of a request in each KV group, with id 0 for released blocks; empty lists: the request holds
        no blocks."""
        ours = self._of_id.get(request_id)
        if ours is None:
            return tuple([] for _ in range(self.num_kv_cache_groups))
        return tuple(self._core.block_tables(ours.request_id).tolist())
