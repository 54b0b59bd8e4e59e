"""Runs a GPU's steps on the CPU: Triton's kernels are interpreted, and a graph repeats the recorded calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.attention import triton_backend
from pointsman.engine.attention.triton_backend import TritonAttention
from pointsman.engine.device import FromDevice
from pointsman.engine.model.decode_graphs import bucket_sizes
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.model.prepared import PreparedStep
from pointsman.engine.model.runner import NOT_FINITE, LaunchedStep, StepExecution
from tests.engine.engine_loop import drain, free_blocks
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build
from tests.triton_interpreter import quick_calls


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets Triton interpret kernels, with KV divided into fewer splits, because each program takes a millisecond."""
    monkeypatch.setattr(triton_backend, "PROGRAMS_PER_PROCESSOR", 1)
    with quick_calls():
        yield


class Again:
    """A recorder that replaces CUDA graphs: a replay calls the recorded function again, over the same memory."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A model of one layer, because the interpreter is slow, and without fused layers."""
    config = FAMILIES["qwen3"]()
    config.num_hidden_layers = config.num_key_value_heads = 1
    return wrap_model(build(config, seed=1), tokenizer=byte_tokenizer(), attention="torch", fuse=False)


def make(
    loaded: LoadedModel, attention: Any = TritonAttention, *, steps: int = 1, graphs: Again | None = None, **knobs: Any
) -> Engine:
    knobs = {"num_blocks": 48, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, **knobs}
    engine = Engine(loaded, attention=attention, max_steps_in_flight=steps, **knobs)
    if graphs is not None:
        engine.runner.record_graphs(1 << 30, lambda: 0, graphs)
        graphs.num_replays = 0
    return engine


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "top_p": 0.8, "seed": 4},
    {"temperature": 0.7, "top_k": 7, "min_p": 0.02, "seed": 5},
]
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
]


MORE = [(1, True), (2, False)]


def texts(
    engine: Engine, params: list[dict[str, Any]], tokens: int = 4, prefix: str = "r"
) -> dict[str, tuple[int, ...]]:
    for number, one in enumerate(params):
        prompt = [3 + (7 * number + 3 * at) % 150 for at in range(3 + 6 * number)]
        engine.add_request(
            f"{prefix}{number}", prompt, SamplingParams(max_tokens=tokens + number, ignore_eos=True, **one)
        )
    found = {request_id.removeprefix(prefix): tuple(output.token_ids) for request_id, output in drain(engine).items()}
    assert free_blocks(engine) == engine.scheduler.config.num_blocks
    return found


@pytest.mark.parametrize(
    ("steps", "with_graphs"), [(1, False), (2, True), *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]
)
def test_device_steps_sample_the_tokens_of_plain_pytorch(loaded: LoadedModel, steps: int, with_graphs: bool) -> None:
    graphs = Again() if with_graphs else None
    want = texts(make(loaded, "torch"), [*SAMPLING, *OTHERS])
    assert texts(make(loaded, steps=steps, graphs=graphs), [*SAMPLING, *OTHERS]) == want
    assert graphs is None or graphs.num_replays > 5


def test_graph_sizes_are_close_to_every_number_of_rows() -> None:
    assert bucket_sizes(3) == [1, 2, 3] and bucket_sizes(8) == [1, 2, 4, 8]
    sizes = bucket_sizes(1024)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24] and sizes[-3:] == [480, 496, 512] and len(sizes) == 39


def run(engine: Engine, count: int = 2, tokens: int = 4, **params: Any) -> dict[str, tuple[int, ...]]:
    return texts(engine, [{"temperature": 0.0, **params}] * count, tokens)


def test_graphs_with_preemption_and_cache_hits_change_no_tokens(loaded: LoadedModel) -> None:
    knobs = {"num_blocks": 9, "max_num_seqs": 3}
    params = [{"temperature": 0.9, "seed": number} for number in range(3)]
    engine = make(loaded, steps=2, graphs=Again(), **knobs)
    want = texts(make(loaded, "torch", **knobs), params, 9)
    assert texts(engine, params, 9) == want
    assert engine.scheduler.stats().num_preemptions > 0
    assert texts(engine, params, 9, "again") == want, "from cached prefixes"


def test_layers_in_groups_use_the_block_tables_of_their_group() -> None:
    config = FAMILIES["gemma3"]()
    loaded = wrap_model(build(config, seed=1), tokenizer=byte_tokenizer(), attention="torch", fuse=False)
    engines = [make(loaded, attention, num_blocks=64) for attention in ("torch", TritonAttention)]
    engines[1].runner.record_graphs(1 << 30, lambda: 0, Again())
    assert engines[1].scheduler.config.kv_groups
    want, got = (texts(engine, [{"temperature": 0.0}] * 2, 12) for engine in engines)
    assert got == want


def test_a_step_is_launched_while_the_previous_one_computes(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(loaded, steps=2, graphs=Again())
    order: list[str] = []
    launch, collect = engine.runner.launch, engine.runner.collect

    def noting_launch(prepared: PreparedStep) -> LaunchedStep:
        order.append("launched")
        return launch(prepared)

    def noting_collect(launched: LaunchedStep) -> StepExecution:
        execution = collect(launched)
        order.append("collected")
        return execution

    monkeypatch.setattr(engine.runner, "launch", noting_launch)
    monkeypatch.setattr(engine.runner, "collect", noting_collect)
    run(engine, 1, tokens=5)
    assert order == ["launched", *["launched", "collected"] * 4, "collected"]


class NoWaiting(TorchDispatchMode):
    """Raises an error at operators whose results the host needs, because for these PyTorch would wait for a GPU."""

    WAITS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_consecutive"})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket.__name__ not in self.WAITS, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_graphs", [False, True])
def test_a_plain_step_waits_for_one_event(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, with_graphs: bool
) -> None:
    engine = make(loaded, steps=2, graphs=Again() if with_graphs else None)
    waits = 0
    launch, wait = engine.runner.launch, FromDevice.wait

    def watched(prepared: PreparedStep) -> LaunchedStep:
        with NoWaiting():
            return launch(prepared)

    def counted(self: FromDevice) -> Any:
        nonlocal waits
        waits += 1
        return wait(self)

    monkeypatch.setattr(engine.runner, "launch", watched)
    monkeypatch.setattr(FromDevice, "wait", counted)
    texts(engine, SAMPLING, 3)
    assert waits == engine.counters.num_steps


def test_device_tokens_grow_if_a_step_needs_more_places(loaded: LoadedModel) -> None:
    engine = make(loaded, steps=2, graphs=Again())
    steps = engine.runner._device_steps
    assert steps is not None and steps.graphs is not None
    steps._tokens.tokens = steps._tokens.tokens[:2]
    steps.graphs.record_again()
    assert run(engine, 2) == run(make(loaded, "torch"), 2)
    assert len(steps._tokens.tokens) > 2


def test_no_graphs_are_recorded_beyond_the_memory_limit(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    engine, taken = make(loaded), iter([0, 0, 60, 120, 120])
    engine.runner.record_graphs(100, lambda: next(taken), Again())
    steps = engine.runner._device_steps
    assert steps is not None and steps.graphs is not None and steps.graphs.sizes == [2, 4]
    assert "no CUDA graphs of 1 rows or fewer" in caplog.text
    assert run(engine, 1) == run(make(loaded, "torch"), 1)


def test_steps_run_without_graphs_if_recording_fails(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    class Refuses:
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    engine = make(loaded)
    engine.runner.record_graphs(1 << 30, lambda: 0, Refuses())
    assert "decode steps run without CUDA graphs; recording them failed: operation not permitted" in caplog.text
    assert run(engine) == run(make(loaded, "torch"))


@pytest.mark.parametrize("with_graphs", [False, True])
def test_logits_that_are_not_finite_end_their_request_alone(with_graphs: bool) -> None:
    config = FAMILIES["qwen3"]()
    config.num_hidden_layers = 1
    model = build(config, seed=1)
    loaded = wrap_model(model, tokenizer=byte_tokenizer(), attention="torch", fuse=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = math.nan
    engine = make(loaded, steps=2, graphs=Again() if with_graphs else None)
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for name, prompt in (("bad", [5, 7]), ("good", [5, 6])):
        engine.add_request(name, prompt, greedy)
    done = drain(engine)
    assert done["bad"].outputs[0].finish_reason == "error" and NOT_FINITE in str(done["bad"].outputs[0].finish_detail)
    assert len(done["good"].token_ids) == 3


@pytest.mark.long
def test_fused_layers_with_graphs_give_the_same_tokens(loaded: LoadedModel) -> None:
    """The model's layers are fused, as on a GPU, and their steps run as recorded graphs."""
    config = FAMILIES["qwen3"]()
    config.num_hidden_layers = config.num_key_value_heads = 1
    fused = wrap_model(build(config, seed=1), tokenizer=byte_tokenizer(), attention=TritonAttention)
    assert fused.fused["FusedLayer"] == 1 and fused.drops_tokens_early
    graphs = Again()
    assert texts(make(fused, "auto", steps=2, graphs=graphs), SAMPLING) == texts(make(loaded, "torch"), SAMPLING)
    assert graphs.num_replays > 5
