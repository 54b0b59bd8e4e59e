"""Tenants: finds the tenant of a request, for fair orders and metrics.

By default the tenant is the name of the API key, which a client cannot choose. A field or header that names the tenant
(`--tenant-from`) can be forged by the sender, so it is for servers behind a proxy that sets it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pointsman.server.config import OPERATOR
from pointsman.server.service.names import OWNER
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.protocol import MAX_USER_CHARACTERS

if TYPE_CHECKING:
    from starlette.types import Scope

    from pointsman.server.config import ServerConfig


class TenantRule:
    """Finds the tenant of each request.

    Args:
        config: the operator's settings, with the names of the keys and the source of tenants.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._of_keys = config.tenants
        # If clients have keys, only operators' requests come without a client's key.
        self._without_key = OPERATOR if config.api_keys else ""
        kind, _, header = config.tenant_from.partition(":")
        self._reads_user = kind == "user"
        self._header = header
        self._header_name = header.lower().encode("ascii")

    def find_tenant(self, scope: Scope, user: str | None = None) -> str:
        """The tenant of a request; "" if clients have no keys and nothing else names the tenant.

        Args:
            scope: ASGI scope of the request.
            user: the body's field `user`; None: the client left it out, or the body has not arrived yet.

        Raises:
            ApiError: 400, the header occurs more than once, or is too long.
        """
        given = user if self._reads_user else self._in_header(scope["headers"]) if self._header else None
        if given:
            return given
        owner: int | None = scope.get(OWNER)
        return self._without_key if owner is None else self._of_keys[owner]

    def _in_header(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        values = [value for name, value in headers if name == self._header_name]
        if len(values) > 1:  # the client sent the header too, besides the proxy
            raise ApiError(400, f"the header {self._header} occurs {len(values)} times; send it once")
        tenant = values[0].decode("latin-1").strip() if values else None
        if tenant and len(tenant) > MAX_USER_CHARACTERS:
            raise ApiError(
                400,
                f"the header {self._header} has {len(tenant)} characters, and at most {MAX_USER_CHARACTERS} are "
                "possible; shorten it",
            )
        return tenant


def isolated_salt(tenant: str, cache_salt: str | None) -> str:
    """A cache salt that isolates a tenant: the tenant's requests share prefixes only with each other, and only with
    equal salts.

    The length in front makes the results of two tenants differ, for any names and any salts.
    """
    own = "" if cache_salt is None else f":{cache_salt}"
    return f"{len(tenant)}:{tenant}{own}"
