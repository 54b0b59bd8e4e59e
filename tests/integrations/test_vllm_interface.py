"""The command `pointsman vllm interface`: on real sources of vLLM, and on sources with planted changes of each kind."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_env import ENVIRONMENT, FOLDERS, NEXT_VERSION, PREVIOUS_VERSION, UNSUPPORTED_VERSION, VLLM_VERSION

import pointsman
from pointsman.cli.vllm import app
from pointsman.integrations.vllm.interface import Findings, NoVLLM, examine
from pointsman.integrations.vllm.interface.uses import Assumption
from pointsman.integrations.vllm.support import UnsupportedVLLM, check_version, problem_of_version
from tests.integrations.vllm_process import VLLM_INSTALLED

DROP_IN = Path(pointsman.__file__).parent / "integrations" / "vllm"
UNTESTED = "9.9.0"
"""An untested version."""


def sources_of(version: str) -> Path:
    """The folder of a version of vLLM."""
    if version != VLLM_VERSION:
        return FOLDERS[version]
    return next(iter(ENVIRONMENT.glob("lib/python*/site-packages")), ENVIRONMENT)


def needs(version: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not (sources_of(version) / "vllm").is_dir(),
        reason=f"vLLM {version} is not in .venv-vllm (benchmarks/vllm_env.py)",
    )


# ---------------------------------------------------------------------- real versions


ON_EACH = pytest.mark.parametrize(
    "version", [pytest.param(each, marks=needs(each)) for each in (PREVIOUS_VERSION, VLLM_VERSION, NEXT_VERSION)]
)


@ON_EACH
def test_every_assumption_about_vllm_holds_in_tested_versions(version: str) -> None:
    found = examine(sources_of(version))
    assert found.version == version
    assert [(each.place, each.expected, each.found) for each in found.broken] == []
    assert [each.expected for each in found.unknown] == ["FlexibleArgumentParser.get_default"]  # of argparse


@ON_EACH
def test_every_vllm_field_in_tested_versions_is_known(version: str) -> None:
    assert [(each.place, each.expected) for each in examine(sources_of(version)).new] == []


@needs(UNSUPPORTED_VERSION)
def test_features_missing_in_an_older_vllm_are_found() -> None:
    found = examine(sources_of(UNSUPPORTED_VERSION)).broken
    broken = {(each.expected.partition("(")[0], file_of(each)) for each in found}
    assert ("ModelConfig.supports_multimodal_inputs", "support.py") in broken
    assert ("EngineCoreOutput.prompt_token_id_logprobs", "results.py") in broken
    assert ("KVCacheCoordinator.get_num_blocks_to_allocate", "kv_groups.py") in broken


# ---------------------------------------------------------------------- uses in our code


def imports_of_vllm() -> set[tuple[str, str]]:
    """(file, name) of all imports of vLLM in the drop-in, found in the simplest way."""
    found = set()
    for path in DROP_IN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                found |= {(path.name, f"{node.module}.{alias.name}") for alias in node.names}
    return found


@VLLM_INSTALLED
def test_every_unguarded_import_of_vllm_is_collected() -> None:
    listed = {(file_of(each), each.expected) for each in installed().assumptions if each.kind == "name"}
    caught = {(file_of(each), each.expected) for each in installed().fallbacks if each.kind == "name"}
    imports = imports_of_vllm()
    assert len(imports) > 100 and len(caught) < 5
    assert imports - listed == caught


@VLLM_INSTALLED
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        pytest.param("settings.py", "SchedulerConfig.watermark", id="a chain from a parameter"),
        pytest.param("kv_groups.py", "KVCacheCoordinator.single_type_managers", id="an attribute of self"),
        pytest.param("kv_groups.py", "KVCacheBlock.ref_cnt", id="a comprehension"),
        pytest.param("scheduler.py", "PrefillStats.set", id="an attribute of our request"),
        pytest.param("results.py", "SamplingMaskLists.slice_request", id="a local"),
        pytest.param("layouts.py", "ChunkedLocalAttentionSpec.attention_chunk_size", id="after isinstance"),
        pytest.param("statistics.py", "PrefixCacheStats.record", id="an attribute with two types"),
        pytest.param("observation.py", "Request.is_prefill_chunk", id="values of a dictionary"),
        pytest.param("kv_events.py", "vllm.distributed.kv_events.MEDIUM_GPU", id="a module under another name"),
        pytest.param("views.py", "Request.num_preemptions", id="vars"),
        pytest.param("scheduler_output.py", "CachedRequestData.resumed_req_ids", id="a parameter"),
    ],
)
def test_vllm_attributes_that_our_code_reads_are_collected(file: str, expected: str) -> None:
    assert (file, expected) in {(file_of(each), each.expected) for each in installed().assumptions}


@VLLM_INSTALLED
def test_many_assumptions_of_each_kind_are_collected() -> None:
    least = {"name": 100, "attribute": 500, "call": 100, "field": 20, "override": 15, "scheduler": 60}
    counts = installed().counts()
    assert {kind for kind in least if counts[kind] < least[kind]} == set()


@VLLM_INSTALLED
def test_scheduler_attributes_that_vllms_engine_reads_are_checked() -> None:
    expected = {each.expected for each in installed().assumptions if each.kind == "scheduler"}
    for name in ("schedule", "update_from_output", "connector", "pause_state", "make_stats", "__init__"):
        assert f"Scheduler.{name}" in expected


def installed() -> Findings:
    return examine(sources_of(VLLM_VERSION))


def file_of(assumption: Assumption) -> str:
    return Path(assumption.place.partition(":")[0]).name


# ---------------------------------------------------------------------- planted changes

OUTPUT, CORE, INTERFACE = "v1/core/sched/output.py", "v1/engine/core.py", "v1/core/sched/interface.py"
CHANGES: list[tuple[str, str, str]] = [
    ("v1/utils.py", "def tensor_data(", "def tensor_bytes("),
    ("config/scheduler.py", "max_num_scheduled_tokens", "max_num_scheduled_token_count"),
    ("v1/request.py", "    FINISHED_REPETITION = enum.auto()", ""),
    ("v1/request.py", "self.num_preemptions = 0", "self.preemption_count = 0"),
    ("v1/core/kv_cache_manager.py", "def evict_blocks(self, block_ids", "def evict_blocks(self, level: int, block_ids"),
    ("v1/core/kv_cache_manager.py", "delay_cache_blocks: bool", "cache_later: bool"),
    ("v1/core/kv_cache_utils.py", "def get_kv_cache_configs(", "def make_kv_cache_configs("),
    ("v1/core/kv_cache_utils.py", "    parent_block_hash: BlockHash | None,\n    curr", "    curr"),
    ("v1/metrics/stats.py", "def new(cls, num_spec_tokens: int)", "def make(cls, num_spec_tokens: int)"),
    ("v1/core/sched/scheduler.py", "def set_pause_state(self, pause_state", "def set_pause_state(self, a, pause_state"),
    ("config/vllm.py", "    aux_output_config: AuxOutputConfig", "    outputs_config: AuxOutputConfig"),
    (OUTPUT, "    mm_features: list[MultiModalFeatureSpec]\n", "    features: list[MultiModalFeatureSpec]\n"),
    (OUTPUT, "    num_output_tokens: list[int]\n", "    num_output_tokens: list[int]\n    num_drafts: list[int]\n"),
    (OUTPUT, "    preempted_req_ids: set[str]", "    planted: bool = False\n    preempted_req_ids: set[str]"),
    (OUTPUT, "num_spec_tokens_to_schedule: int = 0", "num_drafts_to_schedule: int = 0"),
    (INTERFACE, "    def add_request(", "    def planted(self): ...\n\n    @abstractmethod\n    def add_request("),
    (INTERFACE, "        block_size: int,\n", "        bytes_of_block: int,\n"),
    (CORE, "self.scheduler.make_stats()", "self.scheduler.make_stats(since=0)"),
    (CORE, "self.scheduler.get_request_counts()", "self.scheduler.planted_counts()"),
    ("__init__.py", '    "AsyncEngineArgs": ".engine.arg_utils:AsyncEngineArgs",\n', ""),
]  # fmt: skip
"""(file, text, new text) of changes in one copy of vLLM, far enough apart that none hides another."""
MOVED = ("v1/spec_decode/metrics.py", "v1/spec_decode/statistics.py")

FOUND = [
    pytest.param("name", "encoder_inputs.py", "vllm.v1.utils.tensor_data", "has no tensor_data", id="a name removed"),
    pytest.param(
        "name",
        "statistics.py",
        "vllm.v1.spec_decode.metrics.SpecDecodingStats",
        "vllm.v1.spec_decode.statistics has it",
        id="a module moved",
    ),
    pytest.param(
        "name",
        "layers.py",
        "vllm.v1.core.kv_cache_utils.get_kv_cache_configs",
        "has no get_kv_cache_configs",
        id="both of two names missing",
    ),
    pytest.param("name", "check.py", "vllm.AsyncEngineArgs", "has no AsyncEngineArgs", id="a lazy name removed"),
    pytest.param(
        "attribute",
        "settings.py",
        "SchedulerConfig.max_num_scheduled_tokens",
        "max_num_scheduled_token_count",
        id="a field renamed",
    ),
    pytest.param("attribute", "results.py", "RequestStatus.FINISHED_REPETITION", "", id="an enum member removed"),
    pytest.param(
        "attribute",
        "scheduler_output.py",
        "SchedulerOutput.num_spec_tokens_to_schedule",
        "num_drafts_to_schedule",
        id="a field that we set renamed",
    ),
    pytest.param("attribute", "statistics.py", "RequestSpecDecodeMetrics.new", "", id="a class method renamed"),
    pytest.param("attribute", "views.py", "Request.num_preemptions", "", id="a key of vars renamed"),
    pytest.param("override", "views.py", "Request.num_preemptions", "", id="an overridden attribute renamed"),
    pytest.param("override", "observer.py", "Scheduler.set_pause_state", "", id="an overridden method changed"),
    pytest.param(
        "call", "kv_groups.py", "KVCacheManager.evict_blocks", "requires block_ids too", id="a required argument added"
    ),
    pytest.param(
        "call", "kv_groups.py", "KVCacheManager.allocate_slots", "not take delay_cache_blocks", id="a keyword renamed"
    ),
    pytest.param("call", "kv_events.py", "hash_block_tokens", "by place, and not 4", id="an argument removed"),
    pytest.param(
        "call", "scheduler_output.py", "CachedRequestData(", "requires num_drafts too", id="a required field added"
    ),
    pytest.param("field", "scheduler_output.py", "NewRequestData.mm_features", "", id="a field that we give renamed"),
    pytest.param("scheduler", "interface.py", "Scheduler.planted", "ours lacks", id="an abstract method added"),
    pytest.param("scheduler", "interface.py", "Scheduler.__init__", "block_size", id="an argument of ours not given"),
    pytest.param("scheduler", "core.py", "Scheduler.planted_counts", "ours lacks", id="a new call on the scheduler"),
    pytest.param("scheduler", "core.py", "Scheduler.make_stats(", "not take since", id="a call with a new argument"),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a vLLM with all changes. Unchanged files are links."""
    target, source = tmp_path_factory.mktemp("planted"), sources_of(VLLM_VERSION)
    changed = {Path("vllm", name) for name, _, _ in CHANGES} | {Path("vllm", MOVED[0])}
    linked(source, target, changed | {parent for each in changed for parent in each.parents})
    for name, text, new in CHANGES:
        path = target / "vllm" / name
        before = path.read_text()
        assert text in before, f"{name} has no {text!r}"
        path.write_text(before.replace(text, new, 1))
    (target / "vllm" / MOVED[0]).rename(target / "vllm" / MOVED[1])
    return target


def linked(source: Path, target: Path, own: set[Path]) -> None:
    """Copy the files in `own`, relative to the source, and link all other files."""

    def fill(folder: Path) -> None:
        (target / folder).mkdir(exist_ok=True)
        for path in (source / folder).iterdir() if folder.parts else [source / "vllm"]:
            name = folder / path.name
            if name not in own:
                (target / name).symlink_to(path.resolve())
            elif path.is_dir():
                fill(name)
            else:
                (target / name).write_text(path.read_text())

    fill(Path())


@VLLM_INSTALLED
@pytest.mark.parametrize(("kind", "file", "expected", "found"), FOUND)
def test_a_planted_change_of_vllm_breaks_an_assumption(
    planted: Path, kind: str, file: str, expected: str, found: str
) -> None:
    broken = [each for each in examine(planted).broken if each.kind == kind and each.expected.startswith(expected)]
    (first, *_) = [each for each in broken if file_of(each) == file]
    assert found in first.found
    assert first.expected not in {each.expected for each in installed().broken}


@VLLM_INSTALLED
def test_a_new_vllm_field_with_a_default_is_reported_as_new(planted: Path) -> None:
    found = examine(planted)
    assert "SchedulerOutput.planted" in {each.expected for each in found.new}
    assert not [each for each in found.broken if "SchedulerOutput.planted" in each.expected]


@VLLM_INSTALLED
def test_a_missing_attribute_read_with_a_default_is_a_fallback(planted: Path) -> None:
    found, name = examine(planted), "VllmConfig.aux_output_config"
    assert name in {each.expected for each in found.fallbacks}
    assert name not in {each.expected for each in [*found.assumptions, *installed().fallbacks]}


# ---------------------------------------------------------------------- the command


@VLLM_INSTALLED
def test_vllm_interface_command_lists_broken_and_new_assumptions(planted: Path) -> None:
    done = CliRunner().invoke(app, ["interface", "--sources", str(planted)], standalone_mode=False)
    assert done.return_value == 1
    assert f"{len(examine(planted).broken)} do not hold:" in done.output
    assert "new in vLLM:" in done.output and "SchedulerOutput.planted" in done.output
    assert "1 not known (--all lists them)" in done.output and "get_default" not in done.output
    done = CliRunner().invoke(app, ["interface", "--sources", str(planted), "--all"], standalone_mode=False)
    assert "get_default" in done.output and "VllmConfig.aux_output_config" in done.output


@VLLM_INSTALLED
def test_vllm_interface_command_accepts_a_package_and_prints_json() -> None:
    package = sources_of(VLLM_VERSION) / "vllm"
    done = CliRunner().invoke(app, ["interface", "--sources", str(package), "--json"], standalone_mode=False)
    printed = json.loads(done.output)
    assert done.return_value == (1 if printed["broken"] else 0)
    assert printed["version"] == VLLM_VERSION
    assert sum(printed["counts"].values()) == len(installed().assumptions)


def test_error_about_a_folder_without_vllm_has_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoVLLM, match=rf"no vLLM in {tmp_path}; give --sources"):
        examine(tmp_path)


# ---------------------------------------------------------------------- the start with an untested version


@pytest.fixture
def installed_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes the vLLM in a folder the installed one: it is first on the path, like a folder in PYTHONPATH."""
    return lambda folder: monkeypatch.syspath_prepend(folder)


@VLLM_INSTALLED
def test_an_untested_vllm_is_refused_with_its_broken_assumptions(
    planted: Path, installed_as: Callable[[Path], None]
) -> None:
    installed_as(planted)
    num_broken = len(examine().broken)
    for allows in (False, True):
        with pytest.raises(UnsupportedVLLM) as refused:
            check_version(UNTESTED, allows_untested=allows)
        said = str(refused.value)
        assert f"{num_broken} assumptions about it do not hold" in said and f"and {num_broken - 3} more" in said
        assert "pointsman vllm interface lists all" in said and "untested_version" not in said


@VLLM_INSTALLED
def test_an_untested_vllm_starts_if_allowed_and_no_assumption_is_broken(
    installed_as: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    installed_as(sources_of(VLLM_VERSION))
    problem = problem_of_version(UNTESTED)
    assert problem is not None and problem.key == "version"
    assert '{"pointsman": {"untested_version": true}} in --additional-config' in problem
    check_version(UNTESTED, allows_untested=True)
    assert f"vLLM {UNTESTED} was not tested" in caplog.text and "behaviour may have changed" in caplog.text
