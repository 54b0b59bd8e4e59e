"""Memory of a GPU, with fake figures of the device: the size of the KV pool, and errors for too little memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pointsman.engine import Engine, ModelLoadError, SamplingParams
from pointsman.engine import engine as engine_module
from pointsman.engine.errors import EngineStepError
from pointsman.engine.kv.pool import bytes_per_block
from pointsman.engine.memory import (
    GIB,
    CudaMemory,
    DeviceBudget,
    device_memory,
    explain_out_of_memory,
    is_out_of_memory,
    kv_budget,
    measure_peak,
    use_device,
)
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from tests.engine.tiny_models import FAMILIES, build

MIB = 1 << 20


@dataclass
class Memory:
    """Fake memory of a device of 1 GiB, of which other processes use 100 MiB."""

    total: int = GIB
    others: int = 100 * MIB
    reserved: int = 60 * MIB
    peak: int = 50 * MIB
    calls: list[str] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.total - self.others - self.reserved

    def reset_peak(self) -> None:
        self.calls.append("reset_peak")

    def release_unused(self) -> None:
        self.calls.append("release_unused")
        self.reserved = min(self.reserved, 55 * MIB)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


# ---------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("total", "others", "peak", "utilization", "budget"),
    [
        (1000, 0, 300, 0.9, 600),
        (1000, 50, 300, 0.9, 600),  # others fit beside the engine's share
        (1000, 250, 300, 0.9, 450),  # they do not, so the engine gets the rest
        (1000, 450, 300, 0.45, 150),  # two engines on one GPU
        (1000, 0, 950, 0.9, -50),
        (1000, 0, 0, 1.0, 1000),
    ],
)
def test_kv_pool_gets_the_memory_share_minus_peak_activations(
    total: int, others: int, peak: int, utilization: float, budget: int
) -> None:
    assert kv_budget(total, others, peak, utilization) == budget
    assert DeviceBudget(total, others, peak, utilization).kv_bytes == budget


def test_measured_peak_memory_covers_the_run_and_nothing_before() -> None:
    memory = Memory()
    assert measure_peak(lambda: memory.calls.append("run"), memory) == 50 * MIB
    assert memory.calls == ["release_unused", "reset_peak", "run", "release_unused"]


def test_memory_reserved_by_this_process_is_not_used_by_others() -> None:
    budget = DeviceBudget.measure(lambda: None, Memory(), 0.5)
    assert budget == DeviceBudget(GIB, 100 * MIB, 50 * MIB, 0.5)
    assert budget.kv_bytes == (512 - 50) * MIB


def test_cuda_memory_reports_pytorchs_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    for name, value in (
        ("mem_get_info", (7, 9)), ("memory_reserved", 3), ("max_memory_allocated", 2),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, {device: value}.__getitem__)
    memory = device_memory(device)
    assert isinstance(memory, CudaMemory)
    assert (memory.total, memory.free, memory.reserved, memory.peak) == (9, 7, 3, 2)
    assert device_memory(torch.device("cpu")) is None


def test_a_thread_uses_the_gpu_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for name in ("cpu", "cuda", "cuda:1", "meta"):
        use_device(torch.device(name))
    assert used == [torch.device("cuda", 1)]


# ---------------------------------------------------------------------- an engine


def engine_on(memory: Memory, monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, **options: Any) -> Engine:
    """An engine on the CPU that uses the figures of `memory` for its device."""
    monkeypatch.setattr(engine_module, "device_memory", lambda device: memory)
    monkeypatch.setattr(engine_module, "check_utilization", lambda *_: None)
    return Engine(loaded, max_model_len=64, block_size=16, **{"enforce_eager": True, **options})


def tokens_of(engine: Engine) -> list[int]:
    engine.add_request("a", [3, 1, 4, 1, 5], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    found: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = output.outputs[0].token_ids
    return found


@pytest.mark.parametrize(
    ("given", "share", "graphs"),
    [({}, 0.9, 0), ({"gpu_memory_utilization": 0.2}, 0.2, 0), ({"enforce_eager": False}, 0.9, int(0.02 * GIB))],
)
def test_the_kv_pool_gets_the_memory_that_a_measured_step_leaves(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, given: dict[str, float], share: float, graphs: int
) -> None:
    memory = Memory()
    engine = engine_on(memory, monkeypatch, loaded, **given)
    assert memory.calls.count("reset_peak") == 1
    block = bytes_per_block(loaded.layers, 16, torch.float32)
    assert engine.scheduler.config.num_blocks == (int(share * GIB) - 50 * MIB - graphs) // block
    assert engine.kv_pool.num_bytes <= share * GIB - 50 * MIB
    plain = Engine(loaded, max_model_len=64, block_size=16, num_blocks=9)
    assert tokens_of(engine) == tokens_of(plain), "the measured step leaves no trace"
    engine.scheduler.check_invariants()


@pytest.mark.parametrize(("size", "num_blocks"), [({"num_blocks": 7}, 7), ({"kv_cache_bytes": 9 * MIB}, None)])
def test_no_step_is_measured_if_the_pool_size_is_given(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, size: dict[str, int], num_blocks: int | None
) -> None:
    memory = Memory()
    engine = engine_on(memory, monkeypatch, loaded, gpu_memory_utilization=0.01, **size)
    assert memory.calls == []
    block = bytes_per_block(loaded.layers, 16, torch.float32)
    assert engine.scheduler.config.num_blocks == (num_blocks or 9 * MIB // block)


def test_memory_below_one_full_length_request_is_refused(monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel) -> None:
    block = bytes_per_block(loaded.layers, 16, torch.float32)
    share = 60 * MIB / GIB
    with pytest.raises(ValueError) as caught:  # 64 tokens take four blocks
        engine_on(Memory(peak=60 * MIB - 3 * block - 1), monkeypatch, loaded, gpu_memory_utilization=share)
    text = str(caught.value)
    for part in (
        f"gpu_memory_utilization is {share:g} of 1.00 GiB", "have 0.10 GiB", "step take 0.06 GiB", "leaves 0.00 GiB",
        "max_model_len 64 tokens", "raise gpu_memory_utilization", "lower max_model_len to 48 at most",
        "lower max_num_batched_tokens or max_num_seqs", "dtype of fewer bits",
    ):  # fmt: skip
        assert part in text
    assert "\n" not in text
    with pytest.raises(ValueError, match=r"leaves 0\.00 GiB for KV") as caught:
        engine_on(Memory(peak=2 * GIB), monkeypatch, loaded)
    assert "lower max_model_len" not in str(caught.value), "no length would fit"
    four = engine_on(Memory(peak=60 * MIB - 4 * block), monkeypatch, loaded, gpu_memory_utilization=share)
    assert four.scheduler.config.num_blocks == 4


def test_enforce_eager_changes_nothing_on_a_cpu(loaded: LoadedModel) -> None:
    plain, eager = (Engine(loaded, num_blocks=9, enforce_eager=eager) for eager in (False, True))
    assert (plain.enforce_eager, eager.enforce_eager) == (False, True)
    assert tokens_of(plain) == tokens_of(eager)


# ---------------------------------------------------------------------- out of memory

FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 0.5 GiB free. If reserved ..."
)


def test_out_of_memory_is_found_among_the_causes_of_an_error() -> None:
    step = EngineStepError("step 1 failed")
    step.__cause__ = FULL
    assert is_out_of_memory(FULL) and is_out_of_memory(step)
    assert not is_out_of_memory(EngineStepError("step 1 failed")) and not is_out_of_memory(
        RuntimeError("out of memory")
    )
    with pytest.raises(ModelLoadError) as caught, explain_out_of_memory("loading", "lower it", ModelLoadError):
        raise step from FULL
    assert str(caught.value) == "loading needs more memory than the device has free (step 1 failed); lower it"
    with pytest.raises(KeyError), explain_out_of_memory("loading", "lower it"):
        raise KeyError("another")


def full(*_: Any, **__: Any) -> None:
    raise FULL


def test_out_of_memory_in_a_step_or_its_preparation_is_named(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "run_largest_step", full)
        with pytest.raises(ValueError) as caught:
            engine_on(Memory(), patch, loaded)
    assert str(caught.value) == (
        "the largest step needs more memory than the device has free (CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 0 has 0.5 GiB free); lower max_num_batched_tokens or max_num_seqs, or free the device of other programs"
    )
    monkeypatch.setattr(engine_module, "ModelRunner", full)
    with pytest.raises(
        ValueError, match=r"preparing steps needs more memory .*; lower gpu_memory_utilization, kv_cache"
    ):
        Engine(loaded, num_blocks=9)
