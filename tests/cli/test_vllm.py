"""`pointsman explain`, `metrics` and `record` against a running scheduler."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pointsman.cli import main
from pointsman.cli.vllm import GUIDE, METRICS, _duration_text
from pointsman.core.policy.victim import Latest
from pointsman.server.metrics.readings import SCRAPED
from tests.integrations.vllm_operated import Operated, operated

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return command


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Operated]:
    """Two requests run, two wait; the first waiting one needs a sequence slot."""
    with operated(tmp_path / "s") as host:
        for name in ("cmpl-a-0-x", "cmpl-a-1-y", "cmpl-b-0-z", "cmpl-c-0-w"):
            host.add(name)
        host.step()
        yield host


def test_explain_shows_all_requests_as_a_table(host: Operated, run: Run) -> None:
    code, out, _ = run("explain", "--socket", host.control.path)
    assert code == 0
    first, header, *rows, last = [line.rstrip() for line in out.splitlines()]
    assert first == "2 running, 2 waiting, 0 parked"
    assert " ".join(header.split()) == "request state place age prompt output computed blocks preempted why it waits"
    assert [row.split()[0] for row in rows] == ["cmpl-a-0-x", "cmpl-a-1-y", "cmpl-b-0-z", "cmpl-c-0-w"]
    assert re.fullmatch(r"cmpl-a-0-x +running +0\.\ds +6 +1/8 +6 +2 +0", rows[0])
    assert re.fullmatch(
        r"cmpl-b-0-z +waiting +1 +0\.\ds +6 +0/8 +0 +0 +0 +sequence_limit for 0\.\ds, 1 more sequence slot", rows[2]
    )
    assert re.search(r"  behind for 0\.\ds$", rows[3])
    assert last == f"Usual remedy for sequence_limit: a larger max_num_seqs. All reasons and remedies: {GUIDE}"
    assert (ROOT / GUIDE).exists()


def test_explain_with_a_limit_reports_the_number_of_shown_requests(host: Operated, run: Run) -> None:
    _, out, _ = run("explain", "--socket", host.control.path, "--limit", "3")
    assert "cmpl-b-0-z" in out and "cmpl-c-0-w" not in out
    assert out.splitlines()[-2].startswith("Usual remedy for sequence_limit")
    assert out.splitlines()[-1] == "only the 3 oldest are shown; --limit shows more"


def test_explain_without_requests_prints_one_line(tmp_path: Path, run: Run) -> None:
    with operated(tmp_path / "s") as idle:
        assert run("explain", "--socket", idle.control.path)[:2] == (0, "0 running, 0 waiting, 0 parked\n")


def test_explain_with_an_id_shows_all_fields_of_the_request(host: Operated, run: Run) -> None:
    code, out, _ = run("explain", "--socket", host.control.path, "cmpl-b")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == (
        "cmpl-b-0-z waits for 1 more sequence slot: all sequence slots are taken. "
        "Held by cmpl-a-0-x (1), cmpl-a-1-y (1)."
    )
    facts = dict(line.split(maxsplit=1) for line in lines[1:-1] if not line.startswith("held"))
    assert (facts["state"], facts["reason"], facts["place"]) == ("waiting", "sequence_limit", "1")
    assert "position" not in facts
    assert [line for line in lines if line.startswith("held")] == [
        "held by              cmpl-a-0-x: 1 sequence slots",
        "held by              cmpl-a-1-y: 1 sequence slots",
    ]
    assert lines[-1].startswith("Usual remedy for sequence_limit: a larger max_num_seqs. ")
    assert run("explain", "--socket", host.control.path, "cmpl-c")[1].splitlines()[-1].startswith("All reasons and")
    assert "remed" not in run("explain", "--socket", host.control.path, "cmpl-a-0")[1], "it runs"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (8.71, "8.7s"),
        (10.0, "10.0s"),
        (59.96, "1m00.0s"),
        (65, "1m05.0s"),
        (3599.97, "1h00m00.0s"),
        (7205.2, "2h00m05.2s"),
    ],
)
def test_all_durations_have_one_form(seconds: float, text: str) -> None:
    assert _duration_text(seconds) == text


def test_explain_shows_samples_of_a_completion_as_a_table(host: Operated, run: Run) -> None:
    _, out, _ = run("explain", "--socket", host.control.path, "cmpl-a")
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["cmpl-a-0-x", "cmpl-a-1-y"]


def test_explain_names_a_replaced_policy_and_its_replacement(tmp_path: Path, run: Run) -> None:
    class Odd(Latest):
        name = "odd"

        def attach(self, view: Any) -> None:
            raise KeyError("nothing")

    words = "latest decides in the place of victim 'odd', which failed: attach raised KeyError: 'nothing'."
    with operated(tmp_path / "s", victim=Odd()) as host:
        host.add("a")
        host.add("b")
        assert run("explain", "--socket", host.control.path)[1].splitlines()[-2] == words
        assert run("explain", "--socket", host.control.path, "a")[1].splitlines()[0].endswith(f". {words}")
        lines = run("explain", "--socket", host.control.path, "--json")[1].splitlines()
        replaced = {"kind": "victim", "policy": "odd", "by": "latest", "error": "attach raised KeyError: 'nothing'"}
        assert [json.loads(line)["replaced_policies"] for line in lines] == [[replaced], [replaced]]
        metrics = run("metrics", "--socket", host.control.path)[1]
    assert 'engine="0",kind="victim",policy="odd"} 0' in metrics
    assert re.search(r'pointsman:replaced_policies\{.*kind="victim"\} 1', metrics)


def test_explain_as_json_prints_each_request_as_a_line(host: Operated, run: Run) -> None:
    _, out, _ = run("explain", "--socket", host.control.path, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["id"] for line in lines] == list(host.of_id)
    assert [line["position"] for line in lines] == [None, None, 0, 1], "the requests before it"


def test_metrics_prints_text_that_prometheus_can_read(host: Operated, run: Run) -> None:
    code, out, _ = run("metrics", "--socket", host.control.path)
    assert code == 0
    families = {family.name: family for family in text_string_to_metric_families(out)}
    kinds = {definition.name.removesuffix("_total"): definition.kind for definition, _ in SCRAPED}
    assert {name.removesuffix("_total") for name in METRICS} == families.keys() - {"pointsman:requests_refused"}
    for name, family in families.items():
        assert family.type == kinds.get(name, "counter")
        assert all(sample.labels["model_name"] == 'the "demo"' for sample in family.samples)

    def value(name: str, **labels: str) -> float:
        (found,) = (s.value for s in families[name].samples if labels.items() <= s.labels.items())
        return found

    assert value("pointsman:requests_waiting", reason="sequence_limit") == 1
    assert value("pointsman:requests_waiting", reason="behind") == 1
    assert value("pointsman:deferrals", reason="sequence_limit") == 1
    assert value("pointsman:kv_blocks", state="held") == 3  # they share one
    assert value("pointsman:steps") == 1
    assert value("pointsman:scheduler_seconds") == 1.5


def test_the_seconds_of_a_recording_count_from_its_first_step(tmp_path: Path, run: Run) -> None:
    """The first request may arrive long after the recording began."""
    with operated(tmp_path / "s") as host:

        def send() -> None:
            until = time.monotonic() + 60
            while host.recordings.current is None:
                assert time.monotonic() < until
                time.sleep(0.01)
            time.sleep(0.6)  # three times the seconds of the recording
            host.add("a")
            host.run_to_end()

        thread = threading.Thread(target=send)
        thread.start()
        code, out, err = run("record", "--socket", host.control.path, str(tmp_path / "r"), "--seconds", "0.2")
        thread.join()
    assert (code, out) == (0, "")
    first, second, last = err.splitlines()
    assert "recording; the prefix cache was emptied for it. Waiting for the first step" in first
    assert "the first step is recorded; 0.2 s to go" in second
    assert f"9 steps in {tmp_path / 'r'}" in last
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o600
    assert run("replay", str(tmp_path / "r"))[0] == 0


def test_ctrl_c_before_the_first_step_deletes_the_recording(host: Operated, tmp_path: Path) -> None:
    for is_idle, words in ((False, "there was no moment without requests"), (True, "no request arrived during")):
        if is_idle:
            host.run_to_end()
        command = [sys.executable, "-m", "pointsman", "record", "--socket", host.control.path, tmp_path / "r"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 60
        while (host.recordings.current if is_idle else host.recordings.waiting) is None:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.01)
        time.sleep(0.5)  # it has read the answer
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1 and words in err, err
        assert 'from its start: --additional-config \'{"pointsman": {"record": "FILE"}}\'' in err.splitlines()[-1]
        assert not (tmp_path / "r").exists()


def test_ctrl_c_ends_a_recording_with_steps(host: Operated, tmp_path: Path) -> None:
    host.run_to_end()
    command = [sys.executable, "-m", "pointsman", "record", "--socket", host.control.path, tmp_path / "r"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "Waiting for the first step" in process.stderr.readline()
    host.add("d")
    host.run_to_end()  # eight tokens, and the step that reports the end
    assert "the first step is recorded" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and f"9 steps in {tmp_path / 'r'}" in err


@pytest.mark.parametrize("command", [("explain",), ("metrics",), ("record", "r")])
def test_the_error_names_a_socket_without_a_scheduler_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with operated(tmp_path / "s"):
        (tmp_path / "s").rename(tmp_path / "dead")
    for name, words in (
        ("none", "there is no socket none"),
        ("dead", "no process listens on dead; that vLLM has exited"),
    ):
        code, out, err = run(*command, "--socket", name)
        assert (code, out) == (1, "") and words in err and len(err.splitlines()) == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "nobody"), "no request 'nobody' is waiting"),
        (("explain", "--limit", "0"), "limit is 0; it must be an integer from 1 to 1000"),
        (("record", "/nowhere/r"), "cannot write the recording /nowhere/r: No such file"),
        (("record", "/dev/null"), "only be written to a regular file"),
        (("record", "r", "--seconds", "0"), "--seconds is 0; it must be more than 0"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(host: Operated, run: Run, words: tuple[str, ...], said: str) -> None:
    code, out, err = run(*words, "--socket", host.control.path)
    assert code in (1, 2) and out == "" and said in err and len(err.splitlines()) == 1


def test_vllm_check_without_vllm_says_where_to_run_it(run: Run) -> None:
    code, out, err = run("vllm", "check", "some/model", "--max-num-seqs", "3")
    assert (code, out) == (2, "") and "vLLM is not installed in this Python environment" in err
