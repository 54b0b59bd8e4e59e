"""vLLM's flags as knobs, and refusals before anything runs; without vLLM."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pointsman.integrations.vllm
from pointsman.core import ConfigError
from pointsman.core.presets import SYSTEMS
from pointsman.integrations.vllm import support
from pointsman.integrations.vllm.check import Report
from pointsman.integrations.vllm.settings import FLAGS, KNOBS, read_observer_settings, read_settings, scheduler_config
from pointsman.integrations.vllm.support import (
    GO_BACK,
    Refusal,
    UnsupportedVLLM,
    check_supported,
    check_version,
    problem_of_version,
    problems_of,
    untested_parts,
)
from tests.integrations.vllm_configs import vllm_config
from tests.integrations.vllm_process import ROOT

REFERENCE = ROOT / "docs" / "reference" / "vllm.md"


def settled(knobs: dict[str, Any] | None = None, **changes: Any) -> Any:
    return scheduler_config(vllm_config(**changes), SimpleNamespace(num_blocks=40), 16, knobs or {})


def test_flags_of_vllm_have_the_same_meaning_with_the_drop_in() -> None:
    config = settled(
        scheduler_config__max_num_batched_tokens=100,
        scheduler_config__max_num_scheduled_tokens=90,
        scheduler_config__watermark=0.1,
        scheduler_config__policy="priority",
        max_concurrent_batches=2,
        lora_config=SimpleNamespace(max_loras=3),
    )
    assert (config.num_blocks, config.num_reserved_blocks, config.block_size) == (40, 1, 16)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (8, 90, 256)
    assert (config.order, config.max_steps_in_flight, config.max_loras) == ("priority", 2, 3)
    assert int(config.watermark * config.num_usable_blocks) == 4, "of 40 blocks, as vLLM counts"


def test_flags_that_vllm_accepts_are_not_refused() -> None:
    own = dict(read_settings({"pointsman": {"preset": "vllm"}}).knobs)
    assert not settled(own, scheduler_config__scheduler_reserve_full_isl=False).full_sequence_must_fit
    adaptive = {"scheduler_config__long_prefill_token_threshold_adaptive": True}
    config = settled(scheduler_config__long_prefill_token_threshold=64, **adaptive)
    assert config.long_prefill_token_threshold == 0, "vLLM lets a threshold of the whole budget stand without effect"
    assert settled(scheduler_config__watermark=0.01).watermark == 0.0, "less than a block of 40 is none"
    assert 0.97 < settled(scheduler_config__watermark=0.99).watermark < 1.0, "all but one of the usable blocks"


def test_the_prefill_interval_has_the_effect_that_it_has_in_vllm() -> None:
    """Data parallel engines get the decision from the engine core; before 0.33 no other engine has an interval."""
    alone = {"scheduler_config__prefill_schedule_interval": 4}
    several = {**alone, "parallel_config__data_parallel_size": 2}

    def interval(version: str, **changes: Any) -> Any:
        kv_cache_config: Any = SimpleNamespace(num_blocks=40)
        return scheduler_config(vllm_config(**changes), kv_cache_config, 16, {}, version).prefill_interval

    assert interval("0.33.0") == interval("0.32.0") == 1
    assert (interval("0.32.0", **alone), interval("0.33.0", **alone)) == (1, 4)
    assert interval("0.32.0", **several) == interval("0.33.0", **several) == "host"


def test_token_budget_may_be_too_small_for_drafts_of_all_rows() -> None:
    """vLLM's default for a server is 2,048 tokens and 256 requests."""
    many = settled(
        num_speculative_tokens=15,
        scheduler_config__max_num_seqs=256,
        scheduler_config__max_num_batched_tokens=2048,
    )
    assert (many.num_draft_tokens, many.pad_first_decodes) == (15, True)
    table = {"draft_table": [[8, 2]]}
    assert not settled(table, num_speculative_tokens=3, scheduler_config__max_num_seqs=8).pad_first_decodes


def test_knobs_and_presets_are_read_from_additional_config() -> None:
    settings = read_settings({"pointsman": {"decode_reserve": "mean", "socket": "/s", "record": "/r"}})
    assert (dict(settings.knobs), settings.socket, settings.record) == ({"decode_reserve": "mean"}, "/s", "/r")
    assert (settings.max_retention, read_settings({"pointsman": {"max_retention": 5}}).max_retention) == (600, 5)
    assert settled({"decode_reserve": "mean"}).decode_reserve == "mean"
    policies = {"order": "priority-by-arrival", "victim": "latest", "eviction": "reuse", "reserves": ["bypass:bound=8"]}
    assert (settled(policies).reserves, settled(policies).eviction) == (("bypass:bound=8",), "reuse")
    assert settled({"reserves": "growth"}).reserves == ("growth",)
    for absent in ({}, None, {"other": 1}):
        assert read_settings(absent).knobs == {}
    for system in SYSTEMS:
        assert read_settings({"pointsman": {"preset": system}}).knobs.keys() <= KNOBS
    own = read_settings({"pointsman": {"preset": "vllm"}}).knobs
    assert settled(dict(own)).order == "fcfs-front"
    assert settled(dict(own), scheduler_config__policy="priority").order == "priority-by-arrival"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "it must be an object with knobs"),
        ({"max_num_seqs": 3}, "max_num_seqs in --additional-config has no effect: vLLM takes it from --max-num-seqs"),
        ({"max_seqs": 3}, "max_seqs in --additional-config is unknown; choose from .*, socket, token_limits, .*victim"),
        (
            {"reserve": "growth"},
            "reserve in --additional-config is unknown; did you mean reserves\\? choose from admission",
        ),
        ({"preset": "high-throughput"}, "preset in --additional-config is 'high-throughput'; choose one of"),
        ({"kv_load_timeout": 1.0}, "kv_load_timeout in --additional-config is unknown"),
        (
            {"preemption_mode": "swap"},
            "preemption_mode is 'swap': swapping needs host memory .* leave preemption_mode out",
        ),
        (
            {"max_retention": -1},
            "max_retention in --additional-config is -1; it must be a number of seconds, at least 0",
        ),
        ({"max_retention": float("nan")}, "max_retention in --additional-config is nan"),
        ({"max_retention": "long"}, "max_retention in --additional-config is 'long'"),
        ({"socket": 1}, "socket in --additional-config is 1; it must be a path"),
        ({"socket": "a\0b"}, "socket in --additional-config is .*; it must be a path"),
        ({"record": "\ud800"}, "record in --additional-config is .*; it must be a path"),
    ],
)
def test_invalid_additional_config_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings({"pointsman": given})


@pytest.mark.parametrize("name", ["victim", "socket"])
def test_a_key_outside_of_the_pointsman_object_is_refused(name: str) -> None:
    """It would have no effect. Keys of another plugin are accepted."""
    with pytest.raises(ConfigError, match=f'{name} .* is not under the key "pointsman".*{{"{name}": "latest"}}'):
        read_settings({name: "latest", "other": 1})
    assert read_settings({name: "latest", "pointsman": {}}).knobs == {}
    with pytest.raises(ConfigError, match='record in --additional-config is not under the key "pointsman"'):
        read_observer_settings({"record": "run.jsonl"})
    assert read_observer_settings({name: "latest"}) is None


def test_error_about_an_unknown_class_names_the_known_classes() -> None:
    with pytest.raises(AttributeError, match=r"has no 'Schedular'.* pointsman\.integrations\.vllm\.Scheduler or \.Obs"):
        _ = pointsman.integrations.vllm.Schedular


def test_preset_vllm_makes_the_decisions_of_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.integrations.vllm.settings.encoder_sizes", lambda config: (8, 16))
    config = vllm_config(scheduler_config__disable_chunked_mm_input=True)
    found = {}
    for version in ("0.31.0", "0.32.1+cpu", "0.33.0"):
        knobs = read_settings({"pointsman": {"preset": "vllm"}}, version).knobs
        made = scheduler_config(config, SimpleNamespace(num_blocks=40), 16, knobs, version)
        found[version] = (made.split_encoder_inputs, made.own_preemption_ends_step, made.encoder_blocks_queue)
    older = ("begun", True, True)
    assert found == {"0.31.0": older, "0.32.1+cpu": older, "0.33.0": (False, False, False)}


def test_every_knob_is_set_by_a_vllm_flag_or_by_additional_config() -> None:
    assert not KNOBS & FLAGS.keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_mm_encoder_only": True}, "--mm-encoder-only"),
        (
            {"ec_manager_config": SimpleNamespace(encoder_cache_manager_cls="its.Manager")},
            "the encoder cache manager its.Manager would not be used: leave --ec-manager-config out",
        ),
        ({"model_config__is_diffusion": True}, "diffusion"),
        ({"kv_transfer_config": object()}, "leave --kv-transfer-config out"),
        ({"ec_transfer_config": object()}, "leave --ec-transfer-config out"),
        ({"aux_output_config__enabled": True}, "auxiliary outputs"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"observability_config__kv_cache_metrics": True}, "leave --kv-cache-metrics out"),
        (
            {"scheduler_config__async_scheduling": True, "parallel_config__pipeline_parallel_size": 2},
            "pipeline_parallel_size is 2.*--no-async-scheduling",
        ),
        (
            {"speculative_config": SimpleNamespace(method="ngram"), "scheduler_config__async_scheduling": True},
            "--no-async-scheduling",
        ),
        ({"speculative_config": SimpleNamespace(method="eagle"), "num_lookahead_tokens": 3}, "the method 'eagle'"),
        (
            {
                "speculative_config": SimpleNamespace(
                    method="ngram", parallel_drafting=True, max_num_new_slots_for_drafting=2
                )
            },
            "leave parallel_drafting out",
        ),
    ],
)
def test_unsupported_configurations_are_refused_with_a_remedy(changes: dict[str, Any], words: str) -> None:
    check_supported(vllm_config(), None)
    with pytest.raises(UnsupportedVLLM, match=words) as refused:
        check_supported(vllm_config(**changes), None)
    assert "leave --scheduler-cls out" in str(refused.value)


def test_the_vllm_document_lists_exactly_the_refusals() -> None:
    folder = ROOT / "pointsman" / "integrations" / "vllm"
    keys = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == Refusal.__name__:
                first = node.args[0]
                assert isinstance(first, ast.Constant), f"{path.name}:{node.lineno}: the key of a refusal is a word"
                keys.append(first.value)
    text = REFERENCE.read_text().partition("## What is refused")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)
    assert sorted(told) == sorted(set(keys)) and len(told) >= 10


def test_a_refusal_is_a_string_with_a_key() -> None:
    (refused,) = problems_of(vllm_config(kv_transfer_config=object()), None)
    assert refused.key == "kv-connector" and refused.startswith("KV connectors are not supported")


def test_untested_parts_of_the_configuration_are_reported() -> None:
    assert untested_parts(vllm_config()) == []
    speculation = SimpleNamespace(method="suffix")
    changes = {
        "parallel_config__tensor_parallel_size": 2,
        "use_v2_model_runner": True,
        "speculative_config": speculation,
    }
    told = ", ".join(untested_parts(vllm_config(device_config__device_type="cuda", **changes)))
    for part in ("cuda", "second model runner", "'suffix'", "tensor_parallel_size 2"):
        assert part in told


def test_all_reasons_for_a_refusal_are_in_one_error() -> None:
    with pytest.raises(UnsupportedVLLM, match=r"diffusion.*--kv-transfer-config"):
        check_supported(vllm_config(model_config__is_diffusion=True, kv_transfer_config=object()), None)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1+cpu", "0.33.0"])
def test_supported_versions_of_vllm_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.9.0", "0.30.1", "0.34.0.dev1", "1.0"])
def test_unsupported_versions_of_vllm_are_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(UnsupportedVLLM, match=rf"vLLM {version} is installed.*pip install"):
        check_version(version)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_untested_version_must_be_a_boolean(value: object) -> None:
    assert read_settings({"pointsman": {"untested_version": True}}).untested_version
    assert not read_settings({}).untested_version
    with pytest.raises(ConfigError, match=r"untested_version .* must be true or false"):
        read_settings({"pointsman": {"untested_version": value}})


def test_check_reports_that_an_allowed_version_is_untested() -> None:
    assert "9.9.0: not tested: no assumption about its interface is known" in Report("9.9.0", "model").lines()[0]


def test_refusal_of_a_version_suggests_vllms_scheduler_once() -> None:
    with pytest.raises(UnsupportedVLLM, match=r"vLLM 0\.29\.1") as refused:
        check_version("0.29.1+cpu")
    problem = problem_of_version("0.29.1+cpu")
    assert problem is not None
    report = Report("0.29.1+cpu", "model", problems=[problem]).lines()
    assert str(refused.value).count(GO_BACK) == "\n".join(report).count(GO_BACK) == 1
    assert problem_of_version("0.32.1+cpu") is None


def test_flags_that_the_reference_lists_as_kept_are_accepted() -> None:
    """Compares the flags above the refusals with the table of refusals, and with the messages that ask to leave a flag
    out."""
    text = REFERENCE.read_text()
    run, _, refused = text.partition("\n## What differs")[0].partition("\n## What is refused")
    rows = [line.split(" | ") for line in refused.splitlines() if line.startswith("| `")]
    in_table = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)`", row[1])}
    source = re.sub(r'"\s+f?"', "", Path(support.__file__).read_text())
    in_messages = set(re.findall(r"leave (--[\w-]+) out", source)) - {"--scheduler-cls"}
    assert in_messages and in_messages <= in_table | set(re.findall(r"`(--[\w-]+)`", refused))
    sentences = re.split(r"(?<=\.)\s", run)
    runs = {flag for each in sentences if "efused" not in each for flag in re.findall(r"`(--[\w-]+)", each)}
    assert {"--enable-prompt-embeds", "--max-loras", "--async-scheduling"} <= runs
    assert runs & (in_table | in_messages) == set()


def test_prompts_as_embeddings_are_not_refused() -> None:
    assert problems_of(vllm_config(model_config__enable_prompt_embeds=True), None) == []
