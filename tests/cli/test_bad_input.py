"""Bad input as from a new user: one clear line on stderr, exit code 2, nothing on stdout, no traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import MAX_MODEL_LEN, Finished

Run = Callable[..., Finished]


def check_refused(finished: Finished, *words: str) -> None:
    """The output is one line that contains all of `words`."""
    assert finished.code == 2
    assert finished.out == ""
    assert len(finished.errors) == 1, finished.err
    assert "Traceback" not in finished.err
    for word in words:
        assert word in finished.errors[0]


# ---------------------------------------------------------------------- before a model is loaded


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-tokens", "0"], ["max_tokens is 0", "at least 1"]),
        (["--max-tokens", "many"], ["--max-tokens", "integer"]),
        (["--order", "random"], ["order", "random", "fcfs"]),
        (["--victim", "me"], ["victim", "me", "latest"]),
        (["--kv-cache-bytes", "lots"], ["lots", "64MiB"]),
        (["--kv-cache-bytes", "64MiB", "--num-blocks", "5"], ["--num-blocks", "--kv-cache-bytes", "one of them"]),
        (["--threads", "0"], ["--threads is 0", "at least 1"]),
        (["--speed", "2"], ["--speed", "--trace"]),
        (["--limit", "2"], ["--limit", "--trace"]),
        (["--prompt", "a", "--trace", "b"], ["--prompt", "--trace", "one of them"]),
        (["--no-such-option"], ["--no-such-option", "(see pointsman generate --help)"]),
        (["--prompts", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--trace", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--record", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
    ],
)
def test_invalid_options_of_generate_are_refused(pointsman: Run, args: list[str], words: list[str]) -> None:
    check_refused(pointsman("generate", *args), *words)


def test_an_unknown_command_is_refused(pointsman: Run) -> None:
    check_refused(pointsman("generat"), "generat")


def test_a_trace_with_a_broken_line_is_refused(pointsman: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n2023-11-16 18:15:47,five,5\n")
    check_refused(pointsman("generate", "--trace", trace), f"{trace}, line 3: ", "'five'")


def test_stop_strings_with_a_trace_are_refused(pointsman: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n")
    check_refused(
        pointsman("generate", "--trace", trace, "--stop", "x"), "--stop has no effect with --trace", "leave --stop"
    )


@pytest.mark.parametrize("speed", ["-1", "nan", "inf"])
def test_an_invalid_speed_is_refused(pointsman: Run, tmp_path: Path, speed: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n")
    check_refused(pointsman("generate", "--trace", trace, "--speed", speed), "--speed is")


@pytest.mark.parametrize(
    ("content", "words"), [(b"", ["no prompts"]), (b"\n \n", ["no prompts"]), (b"ok\n\xff\xfe\n", ["line 2", "UTF-8"])]
)
def test_a_file_without_prompts_is_refused(pointsman: Run, tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    check_refused(pointsman("generate", "--prompts", path), str(path), *words)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read and write everything")
def test_files_without_permission_are_refused(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "locked"
    path.write_text("a prompt")
    path.chmod(0)
    check_refused(pointsman("generate", "--prompts", path), "Permission denied")
    check_refused(pointsman("generate", "--record", path), "Permission denied")


def test_a_file_that_is_not_a_recording_is_refused(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    check_refused(pointsman("replay", path), str(path), "No such file")
    for content in (b"hello\n", b"\xff\n", b"{}\n", b""):
        path.write_bytes(content)
        check_refused(pointsman("replay", path), str(path))


# ---------------------------------------------------------------------- the model


def test_the_error_names_a_missing_model_directory(pointsman: Run, tmp_path: Path) -> None:
    check_refused(pointsman("generate", "--model", tmp_path / "absent"), str(tmp_path / "absent"))


def test_a_model_directory_without_weights_is_refused(pointsman: Run, model: str, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    (path / "model.safetensors").unlink()
    check_refused(pointsman("generate", "--model", path), str(path), "weights")


def test_truncated_weights_are_refused(pointsman: Run, model: str, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    check_refused(pointsman("generate", "--model", path), "model.safetensors")


def test_an_unknown_dtype_is_refused(pointsman: Run, model: str) -> None:
    check_refused(pointsman("generate", "--model", model, "--dtype", "float8"), "float8", "bfloat16")


def test_an_unknown_kv_dtype_or_device_is_refused(pointsman: Run, model: str) -> None:
    command = ("generate", "--model", model, "--prompt", "a")
    check_refused(pointsman(*command, "--kv-cache-dtype", "fp8"), "fp8", "auto, float32, bfloat16")
    check_refused(pointsman(*command, "--device", "abacus"), "abacus", "use cpu or auto")


# ---------------------------------------------------------------------- prompts


def test_an_empty_prompt_is_refused(pointsman: Run, model: str) -> None:
    finished = pointsman("generate", "--model", model, "--prompt", "", "--json")
    assert finished.code == 2
    assert len(finished.errors) == 1 and "the prompt is empty" in finished.errors[0]
    assert finished.summary["finished"]["refused"] == 1


def test_a_prompt_above_the_maximum_model_length_is_refused(pointsman: Run, model: str) -> None:
    finished = pointsman("generate", "--model", model, "--prompt", "x" * MAX_MODEL_LEN)
    check_refused(finished, f"{MAX_MODEL_LEN} tokens", "max_model_len", "shorten the prompt")


def test_the_error_for_a_too_small_pool_names_the_needed_blocks(pointsman: Run, model: str) -> None:
    prompt = "x" * 100  # 4 blocks of 32 with the first token to generate
    finished = pointsman("generate", "--model", model, "--num-blocks", 1, "--prompt", prompt, "--prompt", prompt)
    check_refused(finished, "all 2 requests were refused", "at least 4 blocks", "needs 16 blocks of 32; the pool has 1")


def test_a_pool_of_one_block_runs_a_request_that_fits_into_it(pointsman: Run, model: str) -> None:
    args = ["--prompt", "abc", "--ignore-eos", "--max-tokens", 40, "--json"]
    finished = pointsman("generate", "--model", model, "--num-blocks", 1, *args)
    assert finished.code == 0
    request = finished.requests["prompt-0"]
    assert (request["finish_reason"], request["finish_detail"]) == ("length", "kv_capacity")
    assert request["num_prompt_tokens"] + request["num_output_tokens"] in (32, 33)


def test_valid_prompts_run_beside_invalid_prompts(pointsman: Run, model: str, tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = [  # the line, and what its error says
        (json.dumps({"prompt": "good", "request_id": "first", "max_tokens": 5, "ignore_eos": True}), ""),
        (json.dumps({"prompt": ""}), "the prompt is empty"),
        (json.dumps({"prompt_token_ids": []}), "the prompt is empty"),
        (json.dumps({"prompt": "half a pair \ud800"}), "not Unicode text at character 12"),
        (json.dumps({"prompt": "a", "temperature": 10**400}), "too large"),
        ('{"prompt": "a", "temperature": 1' + "0" * 5000 + "}", "not JSON"),
        (json.dumps({"prompt_token_ids": [1, 2.5]}), "list of integers"),
        (json.dumps({"prompt_token_ids": [1, 100_000]}), "vocabulary"),
        (json.dumps({"prompt_token_ids": [1, -2]}), "-2"),
        (json.dumps({"prompt": "x" * 2000}), "2000"),
        (json.dumps({"prompt": "a", "max_tokens": 0}), "max_tokens is 0"),
        (json.dumps({"prompt": "a", "max_tokens": "9"}), "max_tokens is '9'"),
        (json.dumps({"prompt": "a", "stop_token_ids": 3}), "stop_token_ids"),
        (json.dumps({"prompt": "a", "logit_bias": {"x": 1}}), "from token ids to numbers"),
        (json.dumps({"prompt": "a", "bad_words": "no"}), "\"bad_words\" is 'no'; it must be a list"),
        (json.dumps({"prompt": "a", "skip_special_tokens": 1}), "true or false"),
        (json.dumps({"prompt": "a", "stop": 5}), '"stop" is 5'),
        (json.dumps({"prompt": "a", "priority": "high"}), "priority"),
        (json.dumps({"prompt": "a", "tenant": 5}), '"tenant" is 5'),
        (json.dumps({"prompt": "a", "ttft_target": 0}), '"ttft_target" is 0'),
        (json.dumps({"prompt": "a", "retention": -1}), '"retention" is -1'),
        (json.dumps({"prompt": "a", "ttft_target": "soon"}), "\"ttft_target\" is 'soon'"),
        (json.dumps({"prompt": "a", "max_token": 3}), "unknown field 'max_token'"),
        (json.dumps({"prompt": "a", "prompt_token_ids": [1]}), 'exactly one of the fields "prompt" and'),
        (json.dumps({"prompt": "a", "request_id": "first"}), "request_id 'first' is already used"),
        (json.dumps({"prompt": "a", "request_id": 3}), "request_id is 3"),
        (json.dumps({"prompt": "a", "request_id": "b\ud800"}), "the request_id is not Unicode text at character 1"),
        ("[1, 2]", "a JSON list"),
        ('{"prompt": "a"', "not JSON"),
        (json.dumps({"prompt_token_ids": [5, 6], "request_id": "last", "max_tokens": 3, "ignore_eos": True}), ""),
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line for line, _ in lines))
    finished = pointsman("generate", "--model", model, "--prompts", path, "--json")
    assert finished.code == 2
    bad = {number: words for number, (_, words) in enumerate(lines, start=1) if words}
    for number, words in bad.items():
        (error,) = (line for line in finished.errors if f"{path}, line {number}: " in line)
        assert words in error
    assert len(finished.errors) == len(bad)
    requests = finished.requests
    assert (requests["first"]["finish_reason"], requests["first"]["num_output_tokens"]) == ("length", 5)
    assert (requests["last"]["finish_reason"], requests["last"]["num_output_tokens"]) == ("length", 3)
    assert finished.summary["finished"] == {"stop": 0, "length": 2, "abort": 0, "refused": len(bad), "error": 0}
