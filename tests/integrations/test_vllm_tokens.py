"""Real vLLM gives the same outputs with our scheduler as with its own, in every configuration.

vLLM's own scheduler is observed, so that its recording becomes a capacity figure; the long form also compares it
unobserved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import replay
from tests.forms import is_long, short_of, short_or_long
from tests.integrations.vllm_process import DEMO, NEEDS_VLLM, run_in_vllm
from tests.integrations.vllm_recorded import check_observed, check_recording
from tests.integrations.vllm_requests import ENGINE, WAYS, Way, make_requests

NUM_REQUESTS = short_or_long(80, 300)
SHORT = {"pressure"}

pytestmark = NEEDS_VLLM


def run_vllm(
    folder: Path,
    way: Way,
    *,
    ours: bool,
    requests: Any,
    aborts: Any,
    lossy: float = 0.0,
    observed: Path | None = None,
    compile_seconds: float = 0.0,
    model: Path = DEMO,
) -> dict[str, Any]:
    """The outputs of the requests in a vLLM of their own; `observed`: record with Observer to this file.
    `compile_seconds`: added to the compile time of each grammar."""
    settings = folder / f"{'ours' if ours else 'theirs'}.json"
    settings.write_text(
        json.dumps(
            {
                "ours": ours,
                "record": str(folder / "recording"),
                "lossy": lossy,
                "async": way.asynchronous,
                "compile_seconds": compile_seconds,
                "model": str(model),
                "engine": {**ENGINE, **way.engine},
                "requests": requests,
                "aborts": aborts,
                "observed": None if observed is None else str(observed),
            }
        )
    )
    return run_in_vllm("vllm_run.py", settings, timeout=600)


def is_prefix(one: list[int], other: list[int]) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


@pytest.mark.next_vllm
@pytest.mark.parametrize("name", short_of(WAYS, SHORT))
def test_completions_equal_those_of_vllms_scheduler(tmp_path: Path, name: str) -> None:
    way = WAYS[name]
    requests, aborts = make_requests(NUM_REQUESTS, seed=1, max_length=way.max_length)
    log = tmp_path / "observed.jsonl"
    theirs = run_vllm(tmp_path, way, ours=False, requests=requests, aborts=aborts, observed=log)
    assert ("AsyncScheduler" in theirs["bases"]) == way.asynchronous and "vllm." in theirs["scheduler"]
    if is_long():
        unobserved = run_vllm(tmp_path, way, ours=False, requests=requests, aborts=aborts, compile_seconds=0.05)
        assert unobserved["scheduler"].startswith("vllm.") and "Observed" in theirs["bases"]
        assert (unobserved["answers"], unobserved["steps"]) == (theirs["answers"], theirs["steps"])
    check_recording(log, check_observed(log, requests, theirs), tmp_path)
    ours = run_vllm(tmp_path, way, ours=True, requests=requests, aborts=aborts)
    assert ours["scheduler"] == "pointsman.integrations.vllm.scheduler"
    assert ours["answers"].keys() == theirs["answers"].keys() == {request["id"] for request in requests}
    num_ended = 0
    for request_id, answer in theirs["answers"].items():
        got = ours["answers"][request_id]
        if "aborted" in (answer["reason"], got["reason"]):  # it may finish by itself in the step of its abort
            assert is_prefix(answer["tokens"], got["tokens"])
        else:
            assert got == answer
            num_ended += 1
    assert num_ended >= 0.85 * len(requests)
    assert ours["usage"] == 0 and ours["counts"] == [0, 0]
    if is_long():
        assert ours["metrics"]["vllm:num_preemptions"] >= way.min_preemptions
    elif way.min_preemptions:
        assert ours["metrics"]["vllm:num_preemptions"] > 0
    assert ours["metrics"]["vllm:prefix_cache_hits"] > 0
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    report = replay((tmp_path / "recording").read_text().splitlines())
    assert report.num_requests == len(requests)
    assert report.num_preemptions == ours["metrics"]["vllm:num_preemptions"] + ours["displaced"]
    assert (ours["displaced"] > 0) == (name == "priority"), "which vLLM's metrics do not count"
    if way.engine.get("speculative_config"):
        assert ours["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "ngram", "async"])
def test_tokens_missing_from_the_runners_output_are_sampled_again(tmp_path: Path, name: str) -> None:
    way = WAYS[name]
    requests, _ = make_requests(NUM_REQUESTS // 2, seed=2, max_length=40)
    found = [run_vllm(tmp_path, way, ours=True, requests=requests, aborts={}, lossy=share) for share in (0.0, 0.05)]
    assert found[0]["answers"] == found[1]["answers"]
    assert (found[0]["unsampled"], found[1]["usage"], found[1]["counts"]) == (0, 0, [0, 0])
    assert found[1]["unsampled"] > 10
    replay((tmp_path / "recording").read_text().splitlines())
