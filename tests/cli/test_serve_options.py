"""`pointsman serve`: the source of each setting, and errors before a model is loaded."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from pointsman.cli.app import command_named
from pointsman.cli.errors import CommandError
from pointsman.cli.options import KNOBS, SERVER
from pointsman.cli.serve import FILE_OPTIONS, ServeSettings, serve_settings
from pointsman.core import SchedulerConfig
from pointsman.core.presets import PRESETS
from pointsman.engine.params.engine_args import SCHEDULER_DEFAULTS, SCHEDULER_NAMES
from pointsman.server.config import ServerConfig
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]


def settings(
    tmp_path: Path, file: str | None = None, environment: dict[str, str] | None = None, **values: Any
) -> ServeSettings:
    path = None
    if file is not None:
        path = str(tmp_path / "serve.yaml")
        Path(path).write_text(file)
    return serve_settings(values, path, environment or {})


# ---------------------------------------------------------------------- every knob is an option


NOT_OPTIONS = {
    *("model", "recorder", "clock"),  # an option of the server; made of --record; for tests
    *(
        "first_chunk_only",
        "admission_charge",
        "count_owed_blocks",
        "admit_after_preemption",
        "shortage",
        "own_preemption_ends_step",
        "encoder_blocks_queue",
    ),  # of other systems
    *(
        "share_within_step",
        "count_common_prefix",
        "max_overtakes",
        "pad_first_decodes",
        "split_encoder_inputs",
        "keep_embeddings",
    ),  # for hosts other than this engine
}


def engine_defaults() -> dict[str, Any]:
    """The arguments of `Engine`, with their defaults."""
    pytest.importorskip("torch")
    from pointsman.engine import Engine

    parameters = inspect.signature(Engine).parameters.values()
    own = {each.name: each.default for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    scheduler = {field.name: field.default for field in fields(SchedulerConfig) if field.name in SCHEDULER_NAMES}
    found = {**scheduler, **SCHEDULER_DEFAULTS, **own}
    return {name: default for name, default in found.items() if name not in NOT_OPTIONS}


def test_every_argument_of_the_engine_is_an_option() -> None:
    names = {"num_threads" if name == "threads" else name for name in KNOBS}
    assert names | {"seed"} == engine_defaults().keys()


def test_every_setting_of_the_server_is_an_option() -> None:
    assert {field.name for field in fields(ServerConfig)} - {
        "api_keys",
        "api_key_names",
        "operator_keys",
    } <= SERVER.keys()
    assert {"api_key", "api_key_file", "operator_key", "operator_key_file"} <= SERVER.keys()


def test_generate_and_serve_have_every_knob() -> None:
    for name in ("generate", "serve"):
        options = {option.name: option for option in command_named(name).params}
        assert KNOBS.keys() <= options.keys()
        for knob in KNOBS:
            option = "--" + knob.replace("_", "-")
            if options[knob].multiple:
                option = option.removesuffix("s")  # a repeatable option has a singular name
            assert option in options[knob].opts


def test_the_help_of_serve_shows_the_defaults() -> None:
    defaults = engine_defaults()
    defaults |= {field.name: field.default for field in fields(ServerConfig)}
    told = 0
    for name, annotation in (KNOBS | SERVER).items():
        found = re.search(r"\[default: ([0-9.a-z]+)", get_args(annotation)[1].help)
        default = defaults.get(name)
        if found and isinstance(default, (int, float, str)) and not isinstance(default, bool):
            told += 1
            in_units = default >> 20 if name == "max_request_bytes" else default
            assert found[1] == (f"{in_units:g}" if isinstance(in_units, float) else str(in_units)), name
    assert told >= 15


# ---------------------------------------------------------------------- the source of a value


def test_the_default_is_the_demo_model_on_this_machine_only(tmp_path: Path) -> None:
    found = settings(tmp_path)
    assert found.engine == {"model": "demo"}
    assert found.server == ServerConfig(served_model_name=("demo",))
    assert found.options == {}


def test_command_line_overrides_file_and_file_overrides_preset(tmp_path: Path) -> None:
    file = "preset: high-throughput\nmax_num_seqs: 100\nport: 1\nhost: localhost\norder: priority\n"
    found = settings(tmp_path, file, port=2, order="fcfs")
    assert found.engine == {
        "model": "demo",
        "max_num_seqs": 100,
        "max_num_batched_tokens": PRESETS["high-throughput"]["max_num_batched_tokens"],
        "enable_chunked_prefill": True,
        "token_limits": (),
        "order": "fcfs",
    }
    assert (found.server.host, found.server.port) == ("localhost", 2)
    other = settings(tmp_path, file, preset="short-requests")
    assert (other.engine["max_num_seqs"], other.engine["max_num_batched_tokens"]) == (100, 4096)


def test_the_configuration_file_may_set_every_option_except_secrets(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n alice : two \n")
    (tmp_path / "operators").write_text("three\n")
    (tmp_path / "template").write_text("{{ messages }}")
    lines = {
        "preset": "default",
        "model": "/models/a",
        "host": "0.0.0.0",
        "port": "0",
        "api_key_file": tmp_path / "keys",
        "operator_key_file": tmp_path / "operators",
        "allowed_host": "[gpu1, 'gpu2:80']",
        "served_model_name": "[a, b]",
        "reserves": '["bypass:bound=3"]',
        "token_limits": "[]",
        "max_connections": "300",
        "max_connections_per_address": "9",
        "max_waiting_requests": "5",
        "max_waiting_prompt_tokens": "100",
        "max_request_bytes": "1MiB",
        "max_total_request_bytes": "3MiB",
        "max_waiting_characters": "5000000",
        "max_tokens_limit": "50",
        "max_n": "2",
        "max_logprobs": "3",
        "max_deadline": "60",
        "min_request_priority": "-5",
        "min_ttft_target": "0.5",
        "max_retention": "90",
        "tenant_from": "header:X-Tenant",
        "isolate_prefixes": "true",
        "drain_delay": "2.5",
        "drain_timeout": "1.5",
        "chat_template": tmp_path / "template",
        "response_role": "helper",
        "log_requests": "yes",
        "log_stats_interval": "0",
        "max_step_retries": "3",
        "warm_up": "no",
        "record": tmp_path / "run.jsonl",
        "record_when_full": "wait",
        "seed": "7",
        "data_parallel_size": "1",
        "max_engine_restarts": "2",
        "max_resumes": "4",
        "engine_timeout": "60",
        "revision": "v1",
        "download_dir": "/models/cache",
        "dtype": "bfloat16",
        "kv_cache_dtype": "float32",
        "quantization": "int8",
        "device": "cpu",
        "attention": "torch",
        "fuse": "false",
        "threads": "2",
        "grammar_timeout": "5",
        "stream_interval": "4",
        "disable_hybrid_kv_cache_manager": "true",
        "kv_offload_bytes": "1GiB",
        "kv_store": tmp_path / "kv",
        "kv_store_role": "both",
        "kv_store_bytes": "2GiB",
        "kv_load_failure_policy": "fail",
        "kv_load_timeout": "4",
        "kv_events_config": '\'{"endpoint": "tcp://127.0.0.1:*"}\'',
        "watchdog_seconds": "30",
        "kv_cache_bytes": "64MiB",
        "enforce_eager": "true",
        "block_size": "16",
        "max_model_len": "512",
        "max_num_seqs": "8",
        "max_num_active_seqs": "6",
        "max_num_batched_tokens": "64",
        "max_steps_in_flight": "2",
        "num_draft_tokens": "3",
        "draft_table": "4:2,8:0",
        "prompt_lookup_min": "2",
        "prompt_lookup_max": "4",
        "order": "priority",
        "victim": "latest",
        "max_policy_failures": "5",
        "eviction": "retention:share=0.25",
        "preemption_mode": "cheaper",
        "displace": "true",
        "watermark": "0.05",
        "decode_reserve": "24",
        "log_request_events": "true",
        "batching": "mixed",
        "enable_prefix_caching": "on",
        "enable_chunked_prefill": "true",
        "long_prefill_token_threshold": "32",
        "prefill_interval": "3",
        "long_prefill_token_threshold_adaptive": "yes",
        "max_num_partial_prefills": "3",
        "max_long_partial_prefills": "1",
        "full_sequence_must_fit": "false",
    }
    left_out = {"api_key", "operator_key", "num_blocks", "speculative_config", "gpu_memory_utilization"}
    assert lines.keys() | left_out >= FILE_OPTIONS.keys()
    lines = {name: value for name, value in lines.items() if name in FILE_OPTIONS}
    found = settings(tmp_path, "".join(f"{name}: {value}\n" for name, value in lines.items()))
    assert found.server == ServerConfig(
        host="0.0.0.0",
        port=0,
        api_keys=("one", "two"),
        api_key_names=("", "alice"),
        operator_keys=("three",),
        allowed_host=("gpu1", "gpu2:80"),
        served_model_name=("a", "b"),
        max_connections=300,
        max_connections_per_address=9,
        max_waiting_requests=5,
        max_waiting_prompt_tokens=100,
        max_request_bytes=2**20,
        max_total_request_bytes=3 * 2**20,
        max_tokens_limit=50,
        max_n=2,
        max_logprobs=3,
        max_deadline=60,
        min_request_priority=-5,
        min_ttft_target=0.5,
        max_retention=90,
        tenant_from="header:X-Tenant",
        max_waiting_characters=5_000_000,
        isolate_prefixes=True,
        drain_delay=2.5,
        drain_timeout=1.5,
        chat_template="{{ messages }}",
        response_role="helper",
        log_requests=True,
    )
    run = {"log_stats_interval": None, "max_step_retries": 3, "record": str(tmp_path / "run.jsonl"), "warm_up": False}
    run |= {"data_parallel_size": 1, "max_engine_restarts": 2, "max_resumes": 4, "engine_timeout": 60.0}
    run |= {"record_when_full": "wait"}
    assert found.options == run
    expected = {"model": "/models/a", "seed": 7, "num_threads": 2, "kv_cache_bytes": 64 * 2**20, "fuse": False}
    assert expected.items() <= found.engine.items()
    assert found.engine.keys() == {"model", "seed", "num_threads"} | (KNOBS.keys() & lines.keys()) - {"threads"}


def test_the_configuration_file_accepts_hyphens_null_and_sizes(tmp_path: Path) -> None:
    found = settings(tmp_path, "max-num-seqs: 9\nport: null\nserved-model-name: x\nkv-cache-bytes: 4096\n")
    assert found.engine == {"model": "demo", "max_num_seqs": 9, "kv_cache_bytes": 4096}
    assert found.server == ServerConfig(served_model_name=("x",))
    assert settings(tmp_path, "").engine == {"model": "demo"}
    assert settings(tmp_path, "# nothing\n").engine == {"model": "demo"}


def test_speculative_config_accepts_vllms_json(tmp_path: Path) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    expected = {"model": "demo", "num_draft_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert settings(tmp_path, f"speculative-config: '{config}'\n").engine == expected
    assert settings(tmp_path, speculative_config=config).engine == expected


def test_only_secrets_come_from_the_environment(tmp_path: Path) -> None:
    environment = {"POINTSMAN_PORT": "1", "POINTSMAN_MODEL": "x", "PORT": "2", "POINTSMAN_ALLOWED_HOST": "y"}
    environment |= {"POINTSMAN_API_KEY": "secret", "POINTSMAN_OPERATOR_KEY": " other \n"}
    assert settings(tmp_path, environment=environment).server == ServerConfig(
        api_keys=("secret",), operator_keys=("other",), served_model_name=("demo",)
    )


def test_keys_come_from_command_line_then_file_then_environment(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("b\nc\n")
    path = str(tmp_path / "keys")
    environment = {"POINTSMAN_API_KEY": "d\n"}
    assert settings(tmp_path, environment=environment, api_key=["a"], api_key_file=path).server.api_keys == ("a",)
    assert settings(tmp_path, environment=environment, api_key_file=path).server.api_keys == ("b", "c")
    assert settings(tmp_path, environment=environment, api_key=[]).server.api_keys == ("d",)


def test_api_keys_in_a_file_may_have_names(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice:a:b\nsesame\nalice:c\n")
    server = settings(tmp_path, api_key_file=str(tmp_path / "keys"), operator_key=["d:e"]).server
    assert (server.api_keys, server.tenants) == (("a:b", "sesame", "c"), ("alice", "key-2", "alice"))
    assert server.operator_keys == ("d:e",)
    (tmp_path / "keys").write_text("a\nb\n")
    server = settings(tmp_path, api_key_file=str(tmp_path / "keys")).server
    assert (server.api_key_names, server.tenants) == ((), ("key-1", "key-2"))
    server = settings(tmp_path, api_key=["a:b"]).server  # only a file has names
    assert (server.api_keys, server.tenants) == (("a:b",), ("key-1",))
    for line, lacks in (
        (":secret", "no name before"),
        ("secret:", "no key after"),
        ("se/cret:x", "name of API key 2 is"),
    ):
        (tmp_path / "keys").write_text(f"a\n{line}\n")
        with pytest.raises(CommandError, match=lacks) as raised:
            settings(tmp_path, api_key_file=str(tmp_path / "keys"))
        assert "API key 2" in str(raised.value) and "cret" not in str(raised.value)


def test_operator_keys_come_from_the_same_sources(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("b\n\n c \n")
    path = str(tmp_path / "keys")
    environment = {"POINTSMAN_OPERATOR_KEY": "d\n"}

    def keys(**values: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        server = settings(tmp_path, environment=environment, **values).server
        return server.operator_keys, server.api_keys

    assert keys(operator_key=["a", "e"], operator_key_file=path) == (("a", "e"), ())
    assert keys(operator_key_file=path, api_key=["f"]) == (("b", "c"), ("f",))
    assert keys(operator_key=[]) == (("d",), ())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_served(tmp_path: Path, name: str) -> None:
    assert PRESETS[name].items() <= settings(tmp_path, preset=name).engine.items()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("port: 1\nmax_num_seq: 4\n", ["line 2", "'max_num_seq' is not an option", "did you mean max_num_seqs?"]),
        ("max-waiting-request: 4\n", ["line 1", "did you mean max_waiting_requests?"]),
        ("num_threads: 4\n", ["line 1", "did you mean threads?"]),
        ("zzz: 1\n", ["'zzz' is not an option", "--help"]),
        ("1: 2\n", ["1 is not an option"]),
        ("port: 1\nport: 2\n", ["line 2", "port was set in line 1 already"]),
        ("max_num_seqs: 1\nmax-num-seqs: 2\n", ["line 2", "max-num-seqs was set in line 1 already"]),
        ("api_key: hidden\n", ["line 1", "secret", "api_key_file", "POINTSMAN_API_KEY"]),
        ("operator_key: hidden\n", ["line 1", "secret", "operator_key_file", "POINTSMAN_OPERATOR_KEY"]),
        ("allowed_host: 5\n", ["allowed_host is 5", "a list of texts"]),
        ("port: '1'\n", ["port is '1'", "a whole number"]),
        ("port: 1.5\n", ["port is 1.5", "a whole number"]),
        ("port: true\n", ["port is True", "a whole number"]),
        ("port: [1]\n", ["port is [1]", "a whole number"]),
        ("watermark: much\n", ["watermark is 'much'", "a number"]),
        ("watermark: true\n", ["watermark is True", "a number"]),
        ("log_requests: 1\n", ["log_requests is 1", "true or false"]),
        ("host: 5\n", ["host is 5", "text"]),
        ("served_model_name: [a, 5]\n", ["served_model_name is ['a', 5]", "a list of texts"]),
        ("max_request_bytes: 1.5\n", ["max_request_bytes is 1.5", "a size like 64MiB"]),
        ("kv_cache_bytes: lots\n", ["'lots'", "64MiB"]),
        ("decode_reserve: 1.5\n", ["decode_reserve is 1.5", "a whole number or a word"]),
        ("decode_reserve: most\n", ["decode_reserve is 'most'", '"mean"']),
        ("- port\n", ["is not a mapping"]),
        ("port\n", ["is not a mapping"]),
        ("port: [1\n", ["not YAML"]),
        ("port: 1\n  host: x\n", ["line 2", "not YAML"]),
        ("port: !!python/object/apply:os.getcwd []\n", ["not YAML", "python/object"]),
        ("port: \x07\n", ["not YAML"]),
        ("port: 65536\n", ["port is 65536"]),
        ("preset: fast\n", ["'fast'", "low-latency"]),
    ],
)
def test_a_wrong_configuration_file_is_refused(tmp_path: Path, file: str, words: list[str]) -> None:
    with pytest.raises(CommandError) as raised:
        settings(tmp_path, file)
    assert raised.value.exit_code == 2
    for word in words:
        assert word in str(raised.value)
    assert "hidden" not in str(raised.value)


def test_a_missing_or_binary_configuration_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    with pytest.raises(CommandError, match="No such file"):
        serve_settings({}, str(path), {})
    path.write_bytes(b"port: \xff\n")
    with pytest.raises(CommandError, match="UTF-8"):
        serve_settings({}, str(path), {})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "65536"], ["port is 65536", "65535"]),
        (["--port", "x"], ["--port", "integer"]),
        (["--api-key-file", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--operator-key-file", "/nowhere/at/all"], ["operator keys", "/nowhere/at/all", "No such file"]),
        (["--max-request-bytes", "many"], ["'many'", "64MiB"]),
        (["--max-retention", "-1"], ["max_retention is -1", "seconds, at least 0"]),
        (["--tenant-from", "header:"], ["tenant_from is 'header:'", "key, user, or header:NAME"]),
        (["--log-stats-interval", "-1"], ["--log-stats-interval is -1"]),
        (["--max-step-retries", "-1"], ["--max-step-retries is -1"]),
        (["--log-stats-interval", "nan"], ["--log-stats-interval is nan"]),
        (["--chat-template", "/nowhere/at/all"], ["chat template", "/nowhere/at/all", "No such file"]),
        (["--record", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--record", "run.jsonl", "--record-when-full", "drop"], ["--record-when-full is 'drop'", "stop or wait"]),
        (["--record-when-full", "wait"], ["no effect without --record"]),
        (["--config", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--preset", "fast"], ["'fast'", "low-latency, high-throughput, long-context, short-requests"]),
        (["--threads", "0"], ["--threads is 0"]),
        (["--kv-cache-bytes", "1MiB", "--num-blocks", "5"], ["--num-blocks", "--kv-cache-bytes"]),
    ],
)
def test_wrong_serve_options_are_refused(pointsman: Run, args: list[str], words: list[str]) -> None:
    check_refused(pointsman("serve", *args), *words)


def test_an_empty_key_file_or_variable_is_refused(
    pointsman: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("\n \n")
    check_refused(pointsman("serve", "--api-key-file", path), str(path), "holds no API key")
    monkeypatch.setenv("POINTSMAN_API_KEY", " ")
    check_refused(pointsman("serve"), "POINTSMAN_API_KEY is empty")
    monkeypatch.delenv("POINTSMAN_API_KEY")
    check_refused(pointsman("serve", "--operator-key-file", path), str(path), "holds no operator key")
    monkeypatch.setenv("POINTSMAN_OPERATOR_KEY", " ")
    check_refused(pointsman("serve"), "POINTSMAN_OPERATOR_KEY is empty")


@pytest.mark.parametrize("name", ["fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"])
def test_the_error_names_a_missing_library(pointsman: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    check_refused(pointsman("serve", "--port", 0), f"serve needs {name}", "pip install 'pointsman[server]'")


@pytest.mark.e2e
def test_the_error_names_a_missing_model(pointsman_process: Run, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    finished = pointsman_process("serve", "--port", 0, "--model", tmp_path / "absent")
    check_refused(finished, str(tmp_path / "absent"))


@pytest.mark.e2e
def test_a_knob_that_contradicts_the_model_is_refused(pointsman_process: Run, model: str) -> None:
    pytest.importorskip("fastapi")
    finished = pointsman_process("serve", "--port", 0, "--model", model, "--max-model-len", 10**6)
    check_refused(finished, "max_model_len is 1000000", "lower max_model_len")
