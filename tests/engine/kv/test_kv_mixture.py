"""Host memory, a store and everything else at random: tight pools, steps in flight and failing, aborts, resets, damage.

Every output must equal that of a large pool, and in the end every block, slot and transfer is accounted for. Each run
is recorded and replayed.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import Recorder, replay
from pointsman.engine import Engine, EngineStepError, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from tests.engine.kv_requests import break_passes, check, drain, make, prompt_of, settle
from tests.engine.tiny_models import FAMILIES, build
from tests.forms import seeds

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
NUM_PROMPTS = 40
NUM_REQUESTS = 40


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[int]]:
    """Expected tokens, by the number of the prompt."""
    engine = make(loaded)
    for number in range(NUM_PROMPTS):
        engine.add_request(str(number), prompt_of(number), PARAMS)
    done = drain(engine)
    return [done[str(number)] for number in range(NUM_PROMPTS)]


def draw_knobs(choose: random.Random, directory: Path) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "max_steps_in_flight": choose.choice([1, 1, 2, 3]),
        "num_blocks": choose.choice([20, 24, 32, 48]),
        "full_sequence_must_fit": choose.random() < 0.5,
        "order": choose.choice(["fcfs", "fcfs", "priority"]),
        "long_prefill_token_threshold": choose.choice([0, 0, 8]),
    }
    if knobs["max_steps_in_flight"] == 1:
        knobs["num_draft_tokens"] = choose.choice([0, 3])
    if choose.random() < 0.7:
        knobs["kv_offload_bytes"] = choose.choice([1 << 12, 1 << 15, 1 << 18])
    if choose.random() < 0.7:
        role = choose.choice(["both", "both", "producer", "consumer"])
        knobs |= {"kv_store": directory, "kv_store_role": role}
        if role != "consumer":
            knobs["kv_store_bytes"] = choose.choice([None, 30_000, 200_000])
        if role != "producer":
            knobs["kv_load_timeout"] = choose.choice([None, None, 1e-4, 0.01])
    return knobs


def damage(choose: random.Random, directory: Path) -> None:
    files = sorted(directory.glob("*/*/*.safetensors"))
    for path in choose.sample(files, min(len(files), 5)):
        if choose.random() < 0.5:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(b"torn")


def run_at_random(engine: Engine, choose: random.Random, expected: list[list[int]], directory: Path) -> int:
    """Add requests at random, some in parts, abort some, and reset the cache now and then. Return the number of failed
    steps."""
    live: dict[str, int] = {}
    to_come: dict[str, list[int]] = {}  # of prompts that come in parts
    num_added = num_failures = 0
    has_failed = False  # the newest step
    while num_added < NUM_REQUESTS or engine.has_unfinished_requests():
        if num_added < NUM_REQUESTS and choose.random() < 0.4:
            name, number = f"r{num_added}", choose.randrange(NUM_PROMPTS)
            priority = choose.randrange(3) if engine.scheduler.config.order == "priority" else 0
            prompt = prompt_of(number)
            if choose.random() < 0.25:
                cut = choose.randrange(1, len(prompt))
                prompt, to_come[name] = prompt[:cut], prompt[cut:]
            engine.add_request(name, prompt, PARAMS, priority=priority, more_input=name in to_come)
            live[name] = number
            num_added += 1
        if to_come and choose.random() < 0.2:
            name = choose.choice(sorted(to_come))
            part, to_come[name] = to_come[name][:7], to_come[name][7:]
            engine.extend(name, part, more_input=bool(to_come[name]))
            if not to_come[name]:
                del to_come[name]
        if live and choose.random() < 0.05:
            name = choose.choice(sorted(live))
            output = engine.abort(name)
            to_come.pop(name, None)
            if output is not None:
                assert list(output.token_ids) == expected[live.pop(name)][: len(output.token_ids)], name
            else:  # it has finished in a step that failed later on; the next one returns its output
                assert has_failed
        if choose.random() < 0.02:
            engine.scheduler.reset_prefix_cache(engine.clock(), preempt_running=choose.random() < 0.5)
        if choose.random() < 0.02:
            damage(choose, directory)
        try:
            outputs, has_failed = engine.step(), False
        except EngineStepError:
            outputs, has_failed = [], True
            num_failures += 1
        for output in outputs:
            if output.finished and output.request_id in live:
                assert list(output.token_ids) == expected[live.pop(output.request_id)], output.request_id
        check(engine)
    assert not live
    return num_failures


@pytest.mark.parametrize("seed", seeds(4, 60))
def test_host_memory_and_kv_store_do_not_change_output_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, expected: list[list[int]], seed: int
) -> None:
    """Two engines one after the other, with one directory."""
    choose = random.Random(seed)
    for part in range(2):
        file = io.StringIO()
        engine = make(loaded, recorder=Recorder(file), **draw_knobs(choose, tmp_path))
        share = choose.choice([0.0, 0.05])
        break_passes(engine, monkeypatch, random.Random(seed + part), share, ("prepare", "run"))
        num_failures = run_at_random(engine, choose, expected, tmp_path)
        assert (num_failures > 0) == (share > 0)
        if engine.kv_connector is not None:
            settle(engine)
        engine.close()
        file.seek(0)
        replay(file)
