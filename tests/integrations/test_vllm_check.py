"""`pointsman vllm check` on every supported version: it will work, it will not, or that is unknown."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integrations.vllm_process import DEMO, NEEDS_VLLM, vllm_parent

pytestmark = [*NEEDS_VLLM, pytest.mark.next_vllm]


def check(*options: object) -> subprocess.CompletedProcess[str]:
    return vllm_parent().run("-m", "pointsman", "vllm", "check", DEMO, *options, timeout=300)


def test_check_accepts_server_options(vllm_version: str) -> None:
    done = check("--port", 8000, "--api-key", "secret", "--max-num-seqs", 64)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"vLLM {vllm_version}: Pointsman " in done.stdout
    assert "it will work: vllm serve" in done.stdout and "layers of FullAttentionSpec" in done.stdout


def test_check_result_is_unknown_if_layers_cannot_be_built() -> None:
    done = check("--tensor-parallel-size", 2)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "it is not known whether the model will work" in done.stdout and "split among 2 devices" in done.stdout
    assert "it will work:" not in done.stdout


def test_check_reports_refusals_even_if_layers_cannot_be_built() -> None:
    done = check("--tensor-parallel-size", 2, "--kv-cache-metrics")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "it will not work" in done.stdout and "--kv-cache-metrics" in done.stdout


def test_check_reports_unusable_paths_of_the_socket_and_the_recording(tmp_path: Path) -> None:
    paths = {"socket": str(tmp_path / "no" / "s"), "record": str(tmp_path / "no" / "r")}
    done = check("--additional-config", json.dumps({"pointsman": paths}))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"cannot listen on the control socket {paths['socket']}: No such file or directory; choose" in done.stdout
    assert f"cannot write the recording {paths['record']}: No such file or directory; choose" in done.stdout
    (tmp_path / "no").mkdir()
    assert check("--additional-config", json.dumps({"pointsman": paths})).returncode == 0
    assert list((tmp_path / "no").iterdir()) == []


def test_check_names_the_rejected_option_and_the_remedy() -> None:
    done = check("--max-num-sequences", 64)
    assert done.returncode == 2 and done.stdout == ""
    message = "pointsman: error: vLLM has no option --max-num-sequences; did you mean --max-num-seqs? vllm serve"
    assert " ".join(done.stderr.split()).startswith(message), done.stderr
    done = check("--additional-config", '{"pointsman": {"victim": latest}}')
    assert done.returncode == 2 and done.stdout == ""
    message = """--additional-config is '{"pointsman": {"victim": latest}}', which is not JSON (Expecting value at"""
    assert message in " ".join(done.stderr.split()) and "<function" not in done.stderr, done.stderr


def test_check_names_options_that_vllm_overrules_and_the_machine() -> None:
    done = check("--async-scheduling", "--max-num-seqs", 64)
    assert done.returncode == 0, done.stdout + done.stderr
    overruled = [line for line in done.stdout.splitlines() if "overrules" in line]
    assert overruled == ["vLLM overrules --async-scheduling here, and runs with --no-async-scheduling"]
    assert "these are the values on a CPU, as this machine has; they may differ on a machine with a GPU" in done.stdout


def test_check_warns_of_a_pool_that_is_too_small_for_one_request() -> None:
    """vLLM's error at the start estimates the same maximum length."""
    small = ("--block-size", 16, "--max-model-len", 2048, "--num-gpu-blocks-override")
    done = check(*small, 20)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "0.148 such requests fit 20 blocks" in done.stdout and "leave --scheduler-cls out" not in done.stdout
    assert (
        "  - the KV cache of 20 blocks holds no request of more than 304 tokens, and --max-model-len is 2,048, so vLLM "
        "does not start: give --max-model-len 304, or --num-gpu-blocks-override 129"
    ) in done.stdout
    assert check(*small, 129).returncode == 0
