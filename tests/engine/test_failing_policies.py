"""Failing policies of another package: every request gets its tokens, and the failure is logged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from tests import faulty_policies
from tests.engine.engine_loop import drain
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build
from tests.faulty_policies import CASES, check_log, formatted, knob

KNOBS = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_tokenizer())


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with faulty_policies.installed(tmp_path / "packages"):
        yield


def answers(engine: Engine) -> dict[str, list[int]]:
    """The outputs of requests that preempt each other and run for more than 100 steps."""
    for index in range(12):
        params = SamplingParams(temperature=0, max_tokens=40 + index, ignore_eos=True)
        engine.add_request(f"r{index}", [3 + (7 * index + 3 * j) % 150 for j in range(9 + index)], params)
    found = {name: output.outputs[0].token_ids for name, output in drain(engine).items()}
    assert engine.scheduler.stats().num_preemptions > 10 and len(found) == 12
    return found


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, list[int]]:
    return answers(Engine(loaded, max_steps_in_flight=1, **KNOBS))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("kind", "at", "after"), CASES)
def test_a_failing_policy_changes_no_tokens(
    loaded: LoadedModel,
    expected: dict[str, list[int]],
    kind: str,
    at: str,
    after: int,
    steps: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(loaded, max_steps_in_flight=steps, **KNOBS, **knob(kind, at, after))
    assert answers(engine) == expected
    (replaced,) = engine.scheduler.replaced_policies
    assert replaced.kind == kind
    check_log(formatted(caplog.records), kind, at_start=at == "constructor")
