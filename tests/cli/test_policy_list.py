"""`pointsman policies`: every registered policy, with its parameters."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pointsman.cli.app import app
from pointsman.core.policy.registry import KINDS, known


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["policies", *arguments], env={"COLUMNS": "120"})
    return done.exit_code, done.output


def test_all_policies_are_listed_with_the_option_that_sets_them() -> None:
    code, output = run()
    assert code == 0
    for kind in KINDS:
        for name, policy in known(kind).items():
            assert name in output
            for parameter in policy.parameters:
                assert f"{parameter.name}={parameter.default}" in output
    for option in ("--order", "--victim", "--reserve", "--token-limit", "--eviction"):
        assert f"{option} POLICY" in output


@pytest.mark.parametrize("kind", KINDS)
def test_policies_of_one_kind_are_listed_as_json(kind: str) -> None:
    code, output = run(kind, "--json")
    found = json.loads(output)
    assert (code, list(found)) == (0, [kind])
    assert [each["name"] for each in found[kind]] == list(known(kind))
    for each in found[kind]:
        assert each["summary"].endswith((".", ")"))
        assert each["version"] >= 1
