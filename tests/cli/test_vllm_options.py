"""Command lines of `vllm serve` with `pointsman serve`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from pointsman.cli import vllm_options
from pointsman.cli.app import command_named
from pointsman.cli.vllm_options import ALREADY, EXPLAINED, HARMLESS, RENAMED, SAME, find, is_flag
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]
Settings = tuple[dict[str, Any], Any, dict[str, Any]]


@pytest.fixture
def served(pointsman: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Settings]:
    """Runs `pointsman serve` with a command line up to the point where the server would start; returns the settings of
    the engine and the server, and the other options."""
    serving = pytest.importorskip("pointsman.server.serve")
    found: list[Settings] = []

    def run(engine: dict[str, Any], server: Any, **others: Any) -> int:
        found.append((engine, server, others))
        return 0

    monkeypatch.setattr(serving, "run", run)

    def serve(line: str) -> Settings:
        finished = pointsman("serve", *shlex.split(line))
        assert finished.code == 0, finished.err
        return found.pop()

    return serve


def own_options() -> dict[str, bool]:
    """The options of `pointsman serve` -> whether the option takes a value."""
    params = command_named("serve").params
    return {
        name: not getattr(param, "is_flag", False) for param in params for name in param.opts + param.secondary_opts
    }


# ---------------------------------------------------------------------- the tables


def test_each_option_is_in_one_table_and_our_names_exist() -> None:
    own = {name.removeprefix("--") for name in own_options()}
    assert SAME - own == {"help"}
    assert {renamed.name for renamed in RENAMED.values()} <= own
    assert not (SAME & set(RENAMED) or SAME & set(EXPLAINED) or set(RENAMED) & set(EXPLAINED))
    assert set(EXPLAINED) >= HARMLESS and set(ALREADY) <= set(EXPLAINED)
    assert not own & set(EXPLAINED)


def test_each_explanation_is_one_line_that_names_existing_options() -> None:
    own = {*own_options(), "--help"}
    for name, text in EXPLAINED.items():
        assert "\n" not in text and not text.endswith("."), name
        for word in text.replace(",", " ").replace(":", " ").replace("(", " ").replace(";", " ").split():
            if word.startswith("--"):
                assert word in own, f"{name}: {word}"


def test_options_are_found_under_all_their_names() -> None:
    assert find("tensor_parallel_size") == find("tp") == ("tensor-parallel-size", True)
    assert find("no-enable-lora") == find("disable-lora") == ("enable-lora", False)
    assert find("enable-hybrid-kv-cache-manager") == ("disable-hybrid-kv-cache-manager", False)
    assert find("no-enable-log-requests") == find("disable-log-requests") == ("disable-log-requests", True)
    assert find("compilation-config.mode") == ("compilation-config", True)
    assert find("no-such-option") is None


# ---------------------------------------------------------------------- the model


def test_the_model_may_be_an_argument(served: Callable[[str], Settings], pointsman: Run) -> None:
    assert served("demo")[0]["model"] == served("demo --model demo")[0]["model"] == "demo"
    assert served("--max-num-seqs 4 Qwen/Qwen3-0.6B")[0]["model"] == "Qwen/Qwen3-0.6B"
    for command in ("serve", "generate"):
        refused = pointsman(command, "demo", "--model", "other")
        check_refused(refused, "the model is demo and --model is other; give one of them")
        assert "[MODEL]" in pointsman(command, "--help").out
    check_refused(pointsman("generate", "/nowhere", "--max-tokens", 1), "no model directory at /nowhere")
    check_refused(pointsman("vllm", "check"), "there is no model to check")
    check_refused(pointsman("vllm", "check", "a", "--model", "b"), "the model is a and --model is b")


# ---------------------------------------------------------------------- options of the same meaning


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--scheduling-policy priority", "--order priority"),
        ("--scheduling-policy=fcfs", "--order fcfs"),
        ("--max-model-len 1k --max_num_batched_tokens 2K", "--max-model-len 1000 --max-num-batched-tokens 2048"),
        ("--kv-cache-memory-bytes 1.5M", "--kv-cache-bytes 1572864"),
        ("--num-gpu-blocks-override 101", "--num-blocks 100"),
        ("--async-scheduling", "--max-steps-in-flight 2"),
        ("--no-async-scheduling", "--max-steps-in-flight 1"),
        ("--no-scheduler-reserve-full-isl", "--no-full-sequence-must-fit"),
        ("--max-num-queued-tokens 5k", "--max-waiting-prompt-tokens 5000"),
        ("--shutdown-timeout 7", "--drain-timeout 7"),
        ("--spec-method ngram --spec-tokens 3", "--num-draft-tokens 3"),
        ("--served-model-name a b --seed 3", "--served-model-name a --served-model-name b --seed 3"),
        ("--disable-log-stats --disable-log-requests", "--log-stats-interval 0 --no-log-requests"),
        ("--disable-prefix-caching --dtype half", "--no-enable-prefix-caching --dtype float16"),
        ("-dp 2", "--data-parallel-size 2"),
        ("--tensor-parallel-size 1 -pp 1 --runner generate --load-format safetensors", ""),
    ],
)  # fmt: skip
def test_vllms_names_are_understood(served: Callable[[str], Settings], pointsman: Run, theirs: str, ours: str) -> None:
    assert served(f"demo {theirs}") == served(f"demo {ours}")


@pytest.mark.parametrize(
    "line",
    [
        "--order fcfs --scheduling-policy priority",
        "--scheduling-policy priority --order fcfs",
        "--drain-timeout 3 --shutdown-timeout 4",
        "--full-sequence-must-fit --no-scheduler-reserve-full-isl",
    ],
)
def test_both_names_with_different_values_are_refused(pointsman: Run, line: str) -> None:
    check_refused(pointsman("serve", "demo", *line.split()), "set the same, with different values; give one of them")


def test_both_names_with_the_same_value_are_accepted(served: Callable[[str], Settings]) -> None:
    assert served("demo --order priority --scheduling-policy priority")[0]["order"] == "priority"


# ---------------------------------------------------------------------- options without a meaning here


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tensor-parallel-size 8", ["--tensor-parallel-size splits a model", "--data-parallel-size runs several"]),
        ("-tp 8", ["-tp splits a model"]),
        ("--trust-remote-code", ["--trust-remote-code", "such models are not run here"]),
        ("--swap-space 4", ["--kv-offload-bytes keeps evicted KV in host memory"]),
        ("--enable-auto-tool-choice --tool-call-parser hermes", ["tool calls", '"tool_choice": "none"']),
        ("--reasoning-parser qwen3", ["they stay in the text"]),
        ("--tokenizer other", ["in the model's folder"]),
        ("--enable-log-requests", ["--log-requests does so with the prompts"]),
        ("--max-num-queued-reqs 100", ["--max-waiting-requests"]),
        ("--speculative-config.method ngram", ["write all fields as one JSON object"]),
        ("--attention-config.backend FLASH_ATTN", ["--attention chooses numba, triton or torch"]),
        ("--scheduling-policy lifo", ["'lifo'", "fcfs and priority"]),
        ("--gpu-memory-utilization 0.5 --device cpu", ["gpu_memory_utilization", "kv_cache_bytes"]),
    ],
)
def test_an_option_without_a_meaning_here_is_answered(pointsman: Run, line: str, words: list[str]) -> None:
    check_refused(pointsman("serve", "demo", *line.split()), *words)


def test_an_option_that_changes_no_output_is_accepted_with_a_warning(
    served: Callable[[str], Settings], capfd: pytest.CaptureFixture[str]
) -> None:
    plain = served("demo")
    for name in sorted(HARMLESS):
        arguments = ["demo", f"--{name}", *([] if is_flag(name) else ["1"])]
        assert vllm_options.translate(arguments, own_options()) == ["demo"], name
        assert capfd.readouterr().err.startswith(f"pointsman: warning: --{name} has no effect: it "), name
    assert served("demo --no-enable-lora --compilation-config.mode 3 -O3 --uvicorn-log-level warning") == plain


def test_a_configuration_file_with_vllms_names_is_answered(pointsman: Run, tmp_path: Any) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("tensor-parallel-size: 2\n")
    check_refused(pointsman("serve", "--config", path), "line 1: 'tensor-parallel-size'", "one device")
    path.write_text("scheduling_policy: fcfs\n")
    check_refused(pointsman("serve", "--config", path), "--scheduling-policy of vLLM is --order here")


# ---------------------------------------------------------------------- lines from vLLM's documentation and recipes


@pytest.mark.parametrize(
    "line",
    [
        "Qwen/Qwen2.5-1.5B-Instruct",
        "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123",
        "meta-llama/Llama-3.1-8B-Instruct --gpu-memory-utilization 0.9 --max-model-len 8k --device cuda",
        "Qwen/Qwen3-8B --served-model-name qwen3 chat --max-num-seqs 64 --max-num-batched-tokens 8192 --seed 0",
        "microsoft/phi-4 --host 0.0.0.0 --port 8001 --uvicorn-log-level info --disable-uvicorn-access-log",
        'facebook/opt-6.7b --speculative-config \'{"method": "ngram", "num_speculative_tokens": 5, '
        '"prompt_lookup_max": 4}\'',
        "meta-llama/Llama-3.1-8B-Instruct --no-enable-prefix-caching --async-scheduling --disable-log-requests",
        "meta-llama/Llama-3.2-1B-Instruct --enforce-eager --block-size 16 --tensor-parallel-size 1 "
        '--compilation-config \'{"cudagraph_mode": "FULL"}\' --max-cudagraph-capture-size 256',
        "google/gemma-3-4b-it --max-num-seqs 4 --limit-mm-per-prompt.image 0 --mm-processor-cache-gb 0",
    ],
)
def test_real_lines_of_vllm_serve_are_understood(served: Callable[[str], Settings], line: str) -> None:
    assert served(line)[0]["model"] == line.split()[0]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("ByteDance-Seed/Seed-OSS-36B-Instruct --tensor-parallel-size 8", "one device"),
        ("google/diffusiongemma-26B-A4B-it --max-num-seqs 4 --reasoning-parser gemma4", "thoughts"),
        ("meta-llama/Llama-3.1-8B-Instruct --enable-lora --lora-modules sql=/adapters/sql", "adapter merged"),
        ("Qwen/Qwen3-8B --ssl-keyfile key.pem --ssl-certfile cert.pem", "TLS"),
    ],
)
def test_real_lines_that_cannot_be_served_are_answered(pointsman: Run, line: str, word: str) -> None:
    check_refused(pointsman("serve", *line.split()), word)
