"""KV memory: the number of blocks beside a model's weights, and the groups of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pointsman.core import KVGroup, SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.errors import ModelTooLarge, SimulationError
from pointsman.sim.memory import layer_groups, num_kv_blocks
from pointsman.sim.shapes import model_shape

LLAMA, LLAMA_70B, GEMMA = (model_shape(name) for name in ("Llama-3.1-8B", "Llama-3.1-70B", "gemma-3-27b-it"))
H100 = device("h100")


def test_kv_blocks_of_llama_8b_match_the_known_number() -> None:
    memory = num_kv_blocks(LLAMA, H100)
    assert memory.num_tokens == pytest.approx(447_000, rel=0.03)
    assert memory.weights + memory.activations + memory.context + memory.kv == memory.usable
    assert memory.block_bytes == 16 * 131072
    assert f"{memory.num_blocks:,} KV blocks" in str(memory)
    assert num_kv_blocks(LLAMA, device("rtx4090")).num_tokens < 50_000
    assert num_kv_blocks(LLAMA, H100, kv_dtype_bytes=1).num_blocks == pytest.approx(2 * memory.num_blocks, abs=1)
    assert num_kv_blocks(LLAMA, H100, gpu_memory_utilization=0.5).num_blocks < memory.num_blocks


def test_error_for_a_too_large_model_names_sizes_and_remedies() -> None:
    with pytest.raises(ModelTooLarge, match=r"Llama-3.1-70B needs 13\d\.\d\d GiB .*more tensor parallelism"):
        num_kv_blocks(LLAMA_70B, H100)
    assert num_kv_blocks(LLAMA_70B, H100, tensor_parallel=4).num_blocks > 10_000


@pytest.mark.parametrize(
    ("full", "windowed", "num_full", "num_windowed", "num_layers"),
    [
        (10, 52, 1, 6, 10),  # gemma-3-27b: the last group of windows has 2 layers
        (12, 12, 1, 1, 12),  # gpt-oss-20b
        (5, 29, 1, 6, 5),  # gemma-3-4b
        (13, 12, 1, 1, 13),  # fewer than 1.5 times as many: padded
        (12, 18, 1, 2, 12),
        (12, 17, 1, 1, 17),
        (52, 10, 6, 1, 10),
        (0, 32, 0, 1, 32),
        (32, 0, 0, 0, 32),
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(
    full: int, windowed: int, num_full: int, num_windowed: int, num_layers: int
) -> None:
    """tests/integrations/test_vllm_groups.py compares these rules with vLLM's function."""
    shape = replace(GEMMA, num_layers=full + windowed, num_windowed_layers=windowed)
    wanted = (KVGroup("window", 1024),) * num_windowed + (KVGroup(),) * num_full
    assert layer_groups(shape) == (wanted, num_layers)
    alone = layer_groups(shape, has_hybrid_manager=False)
    assert alone == (wanted if not full else (), full + windowed)


def test_data_parallel_ranks_divide_the_experts_alone() -> None:
    mixture = model_shape("Qwen3-30B-A3B")
    one, two, four = (num_kv_blocks(mixture, H100, data_parallel=ranks) for ranks in (1, 2, 4))
    routed = mixture.routed_params * 2
    assert one.weights - two.weights == pytest.approx(routed / 2, abs=1)
    assert one.weights - four.weights == pytest.approx(routed * 3 / 4, abs=1)
    assert num_kv_blocks(mixture, H100, data_parallel=2, tensor_parallel=2).weights == two.weights // 2


def test_windowed_layers_keep_less_kv_in_groups() -> None:
    """A block has the layers of one group. Long requests need a fraction of the memory that they need without groups,
    and short ones about the same."""
    plain, grouped = num_kv_blocks(GEMMA, H100, has_hybrid_manager=False), num_kv_blocks(GEMMA, H100)
    assert "with a window" in plain.note and "6 groups of a window of 1024, 1 of full attention" in str(grouped)
    assert plain.block_bytes * 10 == grouped.block_bytes * 62
    assert grouped.kv == plain.kv

    def concurrency(num_tokens: int, **fields: Any) -> float:
        return SchedulerConfig(max_model_len=num_tokens, max_num_batched_tokens=1024, **fields).num_full_length

    ratios = [
        concurrency(length, num_blocks=grouped.num_blocks, kv_groups=grouped.groups.kv_groups)
        / concurrency(length, num_blocks=plain.num_blocks)
        for length in (1000, 8192, 32_768)
    ]
    assert 0.8 < ratios[0] < 1 < 3 < ratios[1] < ratios[2] < 6.2


@pytest.mark.parametrize("wrong", [{"gpu_memory_utilization": 1.5}, {"block_size": 0}, {"tensor_parallel": 0}])
def test_error_names_a_kv_memory_argument_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(SimulationError, match=next(iter(wrong))):
        num_kv_blocks(LLAMA, H100, **wrong)
