"""The border with a host: no object that a host can reach changes the scheduler's decisions; attempts raise or change
copies.

Two schedulers are driven by the same calls. After every third call of one of them, a vandal tries to assign every
public attribute that is reachable from a host's objects, and to change every container and array in place. It uses
`dir`, so that it finds attributes that are added later too. Each attempt raises, or changes a copy: both recordings are
equal in the end. `check_invariants` is called after every call (`Host`).
"""

from __future__ import annotations

import enum
import inspect
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    Explanation,
    FinishReason,
    ParkReason,
    PauseMode,
    Recorder,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
    StepUpdate,
)
from tests.core.helpers import Host, names

LEAVES = (str, bytes, int, float, bool, complex, type(None), np.generic, type)
SNAPSHOTS = (SchedulerStats, Explanation)
"""Types of objects that are created for the host on request. The host owns these objects, and may change their
dictionaries without effect on the scheduler."""
PURE = (SchedulerOutput, StepUpdate, Request, SchedulerConfig)
"""Types whose methods without arguments are called too; their results are attacked."""

OLD_NAMES = ("num_seats", "num_overtaken")
"""Deprecated attributes, which raise a warning."""


class Vandal:
    """Tries to change all objects that it can reach."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.num_assignments = 0
        self.num_arrays = 0
        self._seen: dict[int, Any] = {}  # objects are kept, so that their ids are not reused

    def attack(self, *roots: Any) -> None:
        self._seen.clear()
        for root in roots:
            self._attack(root)

    def _attack(self, thing: Any) -> None:
        if isinstance(thing, LEAVES) or id(thing) in self._seen or callable(thing):
            return
        self._seen[id(thing)] = thing
        self.kinds.add(type(thing).__name__)
        if isinstance(thing, np.ndarray):
            self._scribble(thing)
        elif isinstance(thing, Mapping):
            for item in [*thing.keys(), *thing.values()]:
                self._attack(item)
            thing.clear()  # type: ignore[attr-defined]
        elif isinstance(thing, (tuple, list, set, frozenset)):
            for item in list(thing):
                self._attack(item)
            if isinstance(thing, (list, set)):
                thing.clear()
        if not isinstance(thing, (np.ndarray, list, dict, set, frozenset)) and type(thing) is not tuple:
            self._attack_attributes(thing)

    def _attack_attributes(self, thing: Any) -> None:
        for name in dir(thing):
            if name.startswith("_") or name in OLD_NAMES:
                continue
            value = getattr(thing, name)
            self._refuses(thing, name)
            if callable(value):
                if isinstance(thing, PURE) and not _needs_arguments(value):
                    made = value()
                    if type(made) is not type(thing):  # not copies of the whole, such as those of `replace`
                        self._attack(made)
                continue
            if value is getattr(thing, name) and not isinstance(thing, SNAPSHOTS):
                is_shared = isinstance(value, (list, dict, set, bytearray)) or (
                    isinstance(value, np.ndarray) and value.size > 0 and value.flags.writeable
                )
                assert not is_shared, f"{type(thing).__name__}.{name} hands out the same {type(value).__name__} twice"
            self._attack(value)
        if not isinstance(thing, enum.Enum):
            self._refuses(thing, "no_such_attribute", delete=False)

    def _refuses(self, thing: Any, name: str, *, delete: bool = True) -> None:
        self.num_assignments += 1
        attempts: list[Callable[[], None]] = [lambda: setattr(thing, name, 55)]
        if delete:
            attempts.append(lambda: delattr(thing, name))
        for attempt in attempts:
            try:
                attempt()
            except (AttributeError, TypeError):
                continue
            raise AssertionError(f"{type(thing).__name__}.{name} can be assigned or deleted")

    def _scribble(self, array: np.ndarray[Any, Any]) -> None:
        self.num_arrays += 1
        if array.flags.writeable:  # it is a copy, or the recordings will differ
            array[...] = ~array if array.dtype == np.bool_ else array + 55
            return
        try:
            array[...] = 0
        except ValueError:
            return
        raise AssertionError("an array that is flagged read-only can be written")


def _needs_arguments(method: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:
        return True
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


class Connector:
    """Offers two blocks of every third request, some at once and some asynchronously, and keeps all objects that it
    gets."""

    saves_evicted = True

    def __init__(self) -> None:
        self.given: list[Any] = []

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        self.given.append(request)
        number = int(request.request_id)
        return (8 if number % 3 == 0 and not num_local_tokens else 0), number % 2 == 0

    def request_ended(self, request: Request, block_ids: Any, num_tokens: int, transfer_id: int) -> bool:
        self.given += [request, block_ids]
        return int(request.request_id) % 4 == 1

    def reset(self) -> None:
        pass


SCENES: dict[str, dict[str, Any]] = {
    "plain": {"order": "priority", "log_request_events": True, "enable_kv_cache_events": True, "num_blocks": 12},
    "steps in flight": {"max_steps_in_flight": 2, "count_common_prefix": True, "long_prefill_token_threshold": 4},
    "drafts": {"num_draft_tokens": 2, "draft_table": ((1, 2), (4, 1)), "max_num_batched_tokens": 24},
    "adapters and encoder inputs": {
        "max_loras": 2,
        "encoder_budget": 8,
        "encoder_cache_size": 8,
        "max_steps_in_flight": 2,
    },
    "connector": {"num_blocks": 20, "max_model_len": 32, "max_steps_in_flight": 2, "watermark": 0.05},
    "no sharing within a step": {"share_within_step": False, "batching": "prefill-first", "shortage": "in-order"},
}


def drive(overrides: dict[str, Any], vandal: Vandal | None) -> str:
    """Make a fixed sequence of calls; returns the recording."""
    file = io.StringIO()
    connector = Connector() if "watermark" in overrides else None
    host = Host(recorder=Recorder(file), connector=connector, **overrides)
    scheduler, config = host.scheduler, host.scheduler.config
    held: list[Any] = []  # requests, outputs, updates, events
    transfers: list[int] = []
    in_flight: list[SchedulerOutput] = []
    num_calls = 0

    def attack(*own: Any) -> None:
        """Let the vandal attack. `own`: the host's own arrays and lists, which it reuses."""
        nonlocal num_calls
        num_calls += 1
        if vandal is None:
            return
        for array in own:
            array[:] = 55 if isinstance(array, np.ndarray) else [55] * len(array)
        if num_calls % 3:
            return
        requests = list(dict.fromkeys(item for item in held if isinstance(item, Request)))
        known = [r for r in requests if scheduler.is_id_in_use(r.request_id)]
        asked = [scheduler.explain(request.request_id) for request in known]
        given = [] if connector is None else connector.given[-20:]
        vandal.attack(scheduler, scheduler.stats(), *asked, *given, *held[-30:])
        for output in in_flight:
            vandal.attack(scheduler.input_token_ids(output, allow_unsampled=True))
        for request in requests:
            vandal.attack(request.tokens(0, request.num_tokens), request.output_since(0))

    def add(number: int, length: int, **fields: Any) -> None:
        shared = list(range(2000, 2008)) if number % 2 else []
        prompt = np.array([*shared, *host.prompt(length)], dtype=np.int32)
        inputs: list[Any] = []
        if config.encoder_budget and number % 2:
            inputs = [[f"picture {number % 3}", 1, 4]]
        adapter = (f"adapter {number % 3}", 1) if config.max_loras else None
        stops = [5, 7]
        request = host.add(
            str(number),
            prompt,
            max_tokens=4 + number,
            priority=-number % 3,
            adapter=adapter,
            stop_token_ids=stops,
            encoder_inputs=inputs,
            metadata="the host's",
            **fields,
        )
        held.append(request)
        attack(prompt, stops, inputs)

    add(0, 6)
    add(1, 9)
    add(2, 3, park=ParkReason.GRAMMAR)
    add(3, 12, more_input=True)
    for step in range(40):
        if step == 3:
            host.ready("2")
        if step == 5 and host.scheduler.get_request("3") is not None:
            part = np.array(host.prompt(5), dtype=np.int32)
            host.extend("3", part, max_tokens=6)
            attack(part)
        if 4 <= step <= 12:
            add(step, 4 + step)
        if step == 9 and host.scheduler.get_request("5") is not None:
            host.set_priority("5", -7)
        if step == 11:
            host.abort("6")
        if step == 14 and host.scheduler.get_request("7") is not None:
            host.finish("7", FinishReason.STOP, keep_tokens=1)
        if step == 16:
            host.pause(PauseMode.ADMISSIONS)
        if step == 18:
            host.resume()
        if step == 20 and config.encoder_budget == 0:
            host.reset_prefix_cache()
        output = host.schedule()
        in_flight.append(output)
        held += [output, *output.requests, *scheduler.stalled(host.now, 3.0)]
        transfers += [load.transfer_id for load in output.loads if load.is_async]
        attack()
        if step == 13:
            host.fail(in_flight[0])
            in_flight.clear()
            attack()
        while len(in_flight) >= config.max_steps_in_flight:
            oldest = in_flight.pop(0)
            result = host.result(oldest)
            result.token_ids = np.array(result.token_ids, dtype=np.int32)
            update = scheduler.update(oldest, result, host._tick())
            scheduler.check_invariants()
            held.append(update)
            attack(result.token_ids)
            if config.num_draft_tokens and oldest.num_rows:
                drafts = np.full(2 * oldest.num_rows, 3, dtype=np.int32)
                counts = np.full(oldest.num_rows, 2)
                scheduler.propose(oldest, drafts, counts, host._tick())
                attack(drafts, counts)
        held += scheduler.take_kv_events()
        if transfers and step % 3 == 0:
            held.append(host.transfer_done(transfers.pop(0), num_loaded_tokens=4))
        attack()
    return file.getvalue()


@pytest.mark.parametrize("scene", SCENES)
def test_writes_to_returned_objects_change_no_decision(scene: str) -> None:
    vandal = Vandal()
    undisturbed = drive(SCENES[scene], None)
    assert drive(SCENES[scene], vandal) == undisturbed
    assert {"Scheduler", "SchedulerOutput", "StepUpdate", "Request", "SchedulerStats", "Explanation"} <= vandal.kinds
    assert vandal.num_assignments > 5_000 and vandal.num_arrays > 300
    told = {"plain": "BlockStored", "adapters and encoder inputs": "EncoderInput", "connector": "Load"}
    assert told.get(scene, "Request") in vandal.kinds


def test_the_block_table_cannot_be_made_writable_again() -> None:
    host = Host()
    host.add("a", 6)
    host.step()
    table = host.scheduler.block_table
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 55
    with pytest.raises(ValueError, match="WRITEABLE"):
        table.setflags(write=True)


def test_errors_of_read_only_objects_name_the_method_to_call() -> None:
    host = Host()
    request = host.add("a", 6)
    with pytest.raises(AttributeError, match=r"Request\.priority is read-only; .*set_priority"):
        request.priority = -5  # type: ignore[misc]
    with pytest.raises(AttributeError, match=r"SchedulerOutput\.requests is read-only"):
        host.step().requests = ()
    with pytest.raises(AttributeError):
        host.scheduler.config = host.config  # type: ignore[misc]
    assert request.priority == 0 and isinstance(host.scheduler, Scheduler)


def test_the_scheduler_returns_the_request_object_that_was_added() -> None:
    host = Host()
    request = host.add("a", 6, max_tokens=1, metadata=(metadata := object()))
    output = host.schedule()
    assert output.requests[0] is request and request.metadata is metadata
    assert host.update(output).finished[0] is request
    assert names(host.schedule().finished) == ["a"]


def _writable_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "block_table", property(lambda scheduler: scheduler._kv._tables.ids))


def _lists_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "parked", property(lambda scheduler: scheduler._table.parked), raising=False)


def _assignable_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "__setattr__", object.__setattr__)


@pytest.mark.parametrize("fault", [_writable_table, _lists_of_the_batch, _assignable_requests])
def test_a_returned_object_that_is_writable_is_detected(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError, match=r"twice|can be assigned"):
            drive(SCENES["plain"], Vandal())
