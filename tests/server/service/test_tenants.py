"""The tenant of a request: by its key, or by a field or a header if configured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.server.config import ServerConfig
from pointsman.server.service.names import OWNER
from pointsman.server.service.tenants import TenantRule, isolated_salt
from pointsman.server.wire.errors import ApiError

KEYS = {"api_keys": ("secret-a", "secret-b", "secret-c"), "api_key_names": ("alice", "", "alice")}
PROXY = {"tenant_from": "header:X-Tenant"}


def tenant(config: dict[str, Any], owner: int | None = None, user: str | None = None, *headers: bytes) -> str:
    scope: dict[str, Any] = {
        "type": "http",
        "headers": [(b"user-agent", b"x"), *((b"x-tenant", one) for one in headers)],
    }
    if owner is not None:
        scope[OWNER] = owner
    return TenantRule(ServerConfig(**config)).find_tenant(scope, user)


def test_without_keys_there_is_one_tenant_without_a_name() -> None:
    assert tenant({}) == tenant({}, None, "bob", b"carol") == ""


def test_unnamed_key_is_named_by_its_position() -> None:
    assert [tenant(KEYS, owner) for owner in (0, 1, 2)] == ["alice", "key-2", "alice"]
    assert tenant({"api_keys": ("secret-a", "secret-b")}, 1) == "key-2"
    assert tenant(KEYS, None) == "operator"  # only an operator's key is valid without being a client's


def test_client_cannot_choose_its_tenant_by_default() -> None:
    assert tenant(KEYS, 0, "bob", b"carol") == "alice"


def test_field_user_names_the_tenant_if_configured() -> None:
    config = {**KEYS, "tenant_from": "user"}
    assert tenant(config, 0, "bob", b"carol") == "bob"
    assert tenant(config, 0, None, b"carol") == tenant(config, 0, "") == "alice"
    assert tenant({"tenant_from": "user"}, None, "bob") == "bob"


def test_header_names_the_tenant_if_configured() -> None:
    assert tenant(KEYS | PROXY, 0, "bob", b" carol ") == "carol"
    assert tenant(KEYS | PROXY, 0, "bob") == tenant(KEYS | PROXY, 0, "bob", b"") == "alice"
    assert tenant(PROXY, None, None, b"\xe9t\xe9") == "été"
    with pytest.raises(ApiError, match=r"X-Tenant occurs 2 times; send it once"):
        tenant(PROXY, None, None, b"mine", b"of-the-proxy")
    with pytest.raises(ApiError, match=r"X-Tenant has 1025 characters, and at most 1024"):
        tenant(PROXY, None, None, b"x" * 1025)


# ------------------------------------------------------------------------------------------------- prefixes

NAMES = st.text(":1a2", max_size=5)
SALTS = st.none() | st.text(":1a2", min_size=1, max_size=5)


@given(st.tuples(NAMES, SALTS), st.tuples(NAMES, SALTS))
def test_isolated_salts_of_two_tenants_always_differ(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    assert (isolated_salt(*one) == isolated_salt(*other)) == (one == other)
