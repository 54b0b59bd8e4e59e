"""The step that measures the engine's memory is as large as any scheduled step, and uses a pool of one block."""

from __future__ import annotations

import pytest
import torch

from pointsman.core import SchedulerConfig
from pointsman.engine.kv.layout import choose_layout
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model import largest_step
from pointsman.engine.model.largest_step import prompt_lengths, run_largest_step
from pointsman.engine.model.loader import wrap_model
from tests.engine.tiny_models import FAMILIES, build


@pytest.mark.parametrize(
    ("seqs", "tokens", "length", "drafts", "lengths"),
    [
        (4, 10, 100, 0, [3, 3, 2, 2]),
        (3, 3, 100, 0, [1, 1, 1]),
        (2, 50, 9, 0, [8, 8]),  # no sequence is longer, so no step has more tokens
        (2, 20, 100, 3, [3, 3, 3, 3, 2, 2, 2, 2]),  # a row is sampled once for each draft, too
        (4, 10, 100, 3, [1] * 10),
    ],
)
def test_requests_of_the_largest_step_share_the_token_budget(
    seqs: int, tokens: int, length: int, drafts: int, lengths: list[int]
) -> None:
    config = SchedulerConfig(
        num_blocks=1, max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=tokens, num_draft_tokens=drafts
    )
    assert prompt_lengths(config) == lengths


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_largest_step_runs_over_one_block(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step runs with and without groups of layers."""
    pools: list[int] = []

    class Pool(KVPool):
        def __init__(self, *args: object, num_blocks: int, **options: object) -> None:
            pools.append(num_blocks)
            super().__init__(*args, num_blocks=num_blocks, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(largest_step, "KVPool", Pool)
    loaded = wrap_model(build(FAMILIES[family](), seed=1))
    config = SchedulerConfig(num_blocks=1, max_model_len=64, block_size=4, max_num_seqs=6, max_num_batched_tokens=100)
    layout = choose_layout(loaded.layers, loaded.windows, config, None)
    assert bool(layout.groups) == (family == "gemma3")
    config = config.replace(kv_groups=layout.groups)
    output = run_largest_step(loaded, loaded.attention, config, layout, torch.float32)
    assert (output.num_rows, output.total_num_scheduled_tokens) == (6, 100)
    assert output.samples.all()
    assert pools == [1]
    assert not loaded.context.plans, "no step is running"
