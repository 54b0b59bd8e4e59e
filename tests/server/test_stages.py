"""Stages: the table in the docs matches the code, and limits are made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pointsman.server.config import ServerConfig
from pointsman.server.metrics.table import REFUSALS
from pointsman.server.stages import STAGES, Stage, StageLimits, has_tenants
from pointsman.server.wire.errors import ApiError

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "share_between_tenants.md"
KEYS = {"api_keys": ("one", "two"), "api_key_names": ("alice", "bob")}


def row(stage: Stage) -> str:
    option = "none" if stage.option is None else f"`{stage.option}`"
    refusal = "none" if stage.status is None else f"{stage.status}, `{stage.reason}`"
    cells = (f"`{stage.name}`", stage.unit, stage.meaning, stage.bound, option, stage.bounded_by, refusal)
    return f"| {' | '.join(cells)} |"


def test_stage_table_in_the_docs_matches_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Stages\n") :]
    rows = re.findall(r"^\| `.*$", section[: section.index("\n## ", 1)], re.M)
    assert rows == [row(stage) for stage in STAGES]


def test_each_stage_refuses_with_its_own_reason() -> None:
    reasons = [stage.reason for stage in STAGES if stage.reason is not None]
    assert len(set(reasons)) == len(reasons) and set(reasons) <= set(REFUSALS)


def test_stage_limits_have_the_sizes_of_the_configuration() -> None:
    limits = StageLimits(ServerConfig(max_request_bytes=2048, max_waiting_requests=10, max_waiting_prompt_tokens=7), 3)
    sizes = {limit.stage.name: limit.size for limit in limits.all()}
    assert sizes == {"bodies": 16 * 2048, "texts": 4 * 2048, "requests": 13, "prompt_tokens": 7, "grammars": 1024}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"operator_keys": ("op",)}, False),
        ({"api_keys": ("one",)}, False),
        ({"api_keys": ("one", "two"), "api_key_names": ("alice", "alice")}, False),
        ({"api_keys": ("one",), "operator_keys": ("op",)}, True),
        (KEYS, True),
        ({"tenant_from": "user"}, True),
        ({"tenant_from": "header:X-Tenant"}, True),
    ],
)
def test_only_a_single_tenant_may_use_a_whole_limit(config: dict[str, object], expected: bool) -> None:
    assert has_tenants(ServerConfig(**config)) is expected  # type: ignore[arg-type]


def test_bodies_are_shared_by_tenants_known_before_the_body() -> None:
    def fill(config: ServerConfig) -> int:
        limit, taken = StageLimits(config, 1).bodies, 0
        with pytest.raises(ApiError):
            while True:
                limit.take("", 2**20)
                taken += 1
        return taken

    assert fill(ServerConfig(tenant_from="user")) == 64  # all are of one tenant there
    assert fill(ServerConfig(tenant_from="header:X-Tenant")) == 48
    assert fill(ServerConfig(tenant_from="user", **KEYS)) == 48  # type: ignore[arg-type]
    assert fill(ServerConfig()) == 64


def test_refusal_names_the_exhausted_limit_of_tenant_or_server() -> None:
    limit = StageLimits(ServerConfig(max_waiting_requests=99, **KEYS), 1).requests  # type: ignore[arg-type]
    limit.take("alice", 70)
    with pytest.raises(
        ApiError, match=r"70 requests of this tenant are open, this request would add 10, and the limit is 60"
    ):
        limit.take("alice", 10)
    with pytest.raises(ApiError, match=r"70 requests are open, this request would add 40, and the limit is 100"):
        limit.take("bob", 40)
    limit.take("bob", 30)
    with limit.hold("carol", 0):
        assert limit.total == 100
    assert limit.by_tenant == {"alice": 70, "bob": 30}


def test_stage_without_a_limit_refuses_no_request() -> None:
    limit = StageLimits(ServerConfig(**KEYS), 1).prompt_tokens  # type: ignore[arg-type]
    for _ in range(10):
        limit.take("alice", 10**9)
    assert limit.size is None and limit.held_by("alice") == 10**10
