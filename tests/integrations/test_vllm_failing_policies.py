"""Policies of another package that fail in real vLLM: all requests complete, and operators see the failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.cli.vllm import exposition
from pointsman.core import replay
from tests import faulty_policies
from tests.faulty_policies import CASES, check_log, knob
from tests.forms import short_of
from tests.integrations.vllm_process import DEMO, NEEDS_VLLM, run_in_vllm
from tests.integrations.vllm_requests import ENGINE, WAYS

WAYS_TO_RUN = {"plain": WAYS["pressure"], "async": WAYS["async-pressure"], "ngram": WAYS["ngram"]}
SHORT = {"victim-choose-0-async", "victim-constructor-0-plain", "limit-open_step-100-ngram"}
ALL = {f"{kind}-{at}-{after}-{way}": (kind, at, after, way) for kind, at, after in CASES for way in WAYS_TO_RUN}
SMALL_POOL = {"num_gpu_blocks_override": 20}
REQUESTS = [
    {
        "id": f"r{number}",
        "prompt": [3 + (7 * number + 3 * place) % 2000 for place in range(20 + 9 * number)],
        "params": {"max_tokens": 110 + 5 * number, "ignore_eos": True},
    }
    for number in range(12)
]

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty_policies.install(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The tokens of the requests without these policies, by way and version."""
    return {}


def run_vllm(folder: Path, way: str, knobs: dict[str, Any]) -> dict[str, Any]:
    settings = folder / f"{'faulty' if knobs else 'plain'}.json"
    engine = {**ENGINE, **SMALL_POOL, **WAYS_TO_RUN[way].engine}
    settings.write_text(
        json.dumps(
            {
                "async": WAYS_TO_RUN[way].asynchronous,
                "socket": str(folder / "socket"),
                "record": str(folder / "recording"),
                "knobs": knobs,
                "model": str(DEMO),
                "engine": engine,
                "requests": REQUESTS,
            }
        )
    )
    found: dict[str, Any] = run_in_vllm("vllm_failing_policies.py", settings)
    return found


@pytest.mark.parametrize("case", short_of(ALL, SHORT))
def test_requests_complete_and_policy_failures_are_reported(
    case: str, tmp_path: Path, expected: dict[str, Any], vllm_version: str
) -> None:
    kind, at, after, way = ALL[case]
    if (way, vllm_version) not in expected:
        expected[way, vllm_version] = run_vllm(tmp_path, way, {})["answers"]
    found = run_vllm(tmp_path, way, knob(kind, at, after))
    assert found["answers"] == expected[way, vllm_version] and found["usage"] == 0
    assert found["preemptions"] > 5
    at_start = at == "constructor"
    check_log(found["log"], kind, at_start=at_start)

    name = next(iter(found["metrics"]["stats"]["policy_failures"][kind]))
    labels = f'model_name="{found["metrics"]["model"]}",engine="0",kind="{kind}"'
    metrics = exposition(found["metrics"]).splitlines()
    assert f'pointsman:policy_failures_total{{{labels},policy="{name}"}} {0 if at_start else 3}' in metrics
    assert f"pointsman:replaced_policies{{{labels}}} 1" in metrics
    assert len(found["explained"]) > 1
    for request in found["explained"]:
        (replaced,) = request["replaced_policies"]
        assert (replaced["kind"], replaced["policy"]) == (kind, name)
        assert "raised ZeroDivisionError" in replaced["error"] and replaced["error"] in request["explanation"]

    with faulty_policies.installed(tmp_path / "here"):
        assert replay((tmp_path / "recording").read_text().splitlines()).num_requests == len(REQUESTS)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
@pytest.mark.parametrize(
    ("kind", "at"), [("victim", "choose"), ("order", "key"), ("limit", "check"), ("reserve", "constructor")]
)
def test_failing_policies_change_no_token_with_kv_groups(
    family: str, kind: str, at: str, tmp_path: Path, packages: Path
) -> None:
    """Windows, and states that are kept at the ends of chunks."""
    few = ["num_gpu_blocks_override=24", "max_tokens=60"]
    plain = run_in_vllm("vllm_groups.py", family, "ours", tmp_path, *few, packages=packages)
    knobs = json.dumps({"pointsman": {"socket": "", **knob(kind, at)}})
    faulty = run_in_vllm(
        "vllm_groups.py", family, "ours", tmp_path, *few, f"additional_config={knobs}", packages=packages
    )
    assert faulty["tokens"] == plain["tokens"] and faulty["usage"] == 0


@pytest.mark.long
@pytest.mark.parametrize(("kind", "at"), faulty_policies.WHERE)
def test_a_failing_policy_method_does_not_end_the_engine(
    kind: str, at: str, tmp_path: Path, expected: dict[str, Any], vllm_version: str
) -> None:
    if ("plain", vllm_version) not in expected:
        expected["plain", vllm_version] = run_vllm(tmp_path, "plain", {})["answers"]
    assert run_vllm(tmp_path, "plain", knob(kind, at))["answers"] == expected["plain", vllm_version]
