"""The files around the code: workflows, issue forms, CITATION.cff and the changelog agree with the project."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pointsman.version import __version__
from tests.forms import Shard

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "RELEASING.md",
    ROOT / ".github" / "pull_request_template.md",
]
MAKE = re.compile(r"(?<![\w-])make((?: [\w./=-]+)+)")


def read(path: Path) -> Any:
    """The content of a YAML file. YAML 1.1 reads the key `on` of a workflow as True."""
    content = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in content.items()}


def make_targets() -> set[str]:
    """The targets that .PHONY names, each of which has a rule."""
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    (parts,) = re.findall(r"^PARTS := (.*)$", makefile, re.MULTILINE)
    benchmarks = {f"bench-{part}" for part in parts.split()}
    targets = set(phony.replace("$(PARTS:%=bench-%)", " ".join(benchmarks)).split())
    rules = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    assert targets - rules == benchmarks
    return targets


def made(command: str) -> set[str]:
    """The targets that a shell command gives to make."""
    arguments = [argument for found in MAKE.findall(command) for argument in found.split()]
    return {argument for argument in arguments if "=" not in argument and not argument.startswith("-")}


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in read(workflow)["jobs"].values():
        yield from job["steps"]


def test_workflows_forms_and_make_targets_are_found() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"test", "full", "docs", "release"}
    assert {path.stem for path in FORMS} >= {"bug", "feature", "question"}
    assert made("make -j2 lint WORKERS=4 && make test SHARD=1/6") == {"lint", "test"}
    assert {"test", "test-all", "docs", "dist", "bench-core"} <= make_targets()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_has_jobs_that_github_can_run(path: Path) -> None:
    workflow = read(path)
    assert {"name", "on", "permissions", "jobs"} <= workflow.keys()
    assert workflow["permissions"] == {"contents": "read"}, "a job that needs more asks for it"
    for name, job in workflow["jobs"].items():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= workflow["jobs"].keys() - {name}
        assert job["runs-on"] == "ubuntu-latest"
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step.get("uses", "a/b@v1"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_existing_targets_and_paths(path: Path) -> None:
    commands = [step["run"].replace("${{ matrix.shard }}", "1") for step in steps(path) if "run" in step]
    assert commands
    for command in commands:
        assert made(command) <= make_targets(), command
        for word in shlex.split(command):
            assert not word.startswith(("tests/", "scripts/")) or (ROOT / word).exists(), word


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_text_names_existing_make_targets(path: Path) -> None:
    code = re.findall(r"`(make [^`]+)`|^(?: {4})?((?:\w+=\S+ )*make .*)$", path.read_text(), re.MULTILINE)
    commands = [(quoted or line).partition("#")[0] for quoted, line in code]
    assert commands
    assert {target for command in commands for target in made(command)} <= make_targets()


def test_workflows_test_the_declared_pythons() -> None:
    declared = {name.rpartition(" :: ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    jobs = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]
    (oldest,) = {
        step["with"]["python-version"] for step in jobs["test"]["steps"] if "setup-python" in step.get("uses", "")
    }
    assert PROJECT["requires-python"] == f">={oldest}"
    assert {oldest, *jobs["later-pythons"]["strategy"]["matrix"]["python"]} == declared


def test_shards_of_the_full_workflow_are_all_tests() -> None:
    (job,) = read(ROOT / ".github" / "workflows" / "full.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "SHARD" in step.get("run", "")]
    given = [
        Shard.parse(command.replace("${{ matrix.shard }}", str(shard)).partition("SHARD=")[2])
        for command in commands
        for shard in job["strategy"]["matrix"]["shard"]
    ]
    assert given == [Shard.parse(f"{number}/{len(given)}") for number in range(1, len(given) + 1)]


def test_only_a_tag_publishes_and_only_by_trusted_publishing() -> None:
    release = read(ROOT / ".github" / "workflows" / "release.yml")
    assert release["on"] == {"push": {"tags": ["v*"]}}
    publish = release["jobs"]["publish"]
    assert (publish["environment"], publish["permissions"]) == ("pypi", {"id-token": "write"})
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in "".join(path.read_text() for path in WORKFLOWS)
    deploy = read(ROOT / ".github" / "workflows" / "docs.yml")["jobs"]["deploy"]
    assert "github.event_name == 'workflow_dispatch'" in deploy["if"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_form_has_fields_with_labels(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_bug_form_asks_for_the_version_and_a_recording() -> None:
    fields = {field.get("id"): field for field in read(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")["body"]}
    assert "pointsman --version" in fields["version"]["attributes"]["description"]
    assert "token ids" in fields["recording"]["attributes"]["description"], "a recording holds what users wrote"


def test_citation_has_the_data_of_the_package() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_hooks_run_the_checks_of_make_lint() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}, "nothing is downloaded"
    lint = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    for hook in repository["hooks"]:
        command = hook["entry"].removesuffix(" --force-exclude")
        assert f"\t{command} .\n" in lint


def test_changelog_has_one_line_per_entry_under_known_headings() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    newest, *parts = [line for line in lines if line.startswith("##")]
    assert re.fullmatch(rf"## {re.escape(__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", newest)
    headings = {"### Added", "### Changed", "### Deprecated", "### Removed", "### Fixed", "### Security"}
    assert {part for part in parts if part.startswith("### ")} <= headings
    entries = lines[lines.index(parts[0]) :]
    assert all(line == "" or line.startswith(("- ", "#")) for line in entries if not line.startswith("## "))
    assert max(map(len, lines)) <= 120
