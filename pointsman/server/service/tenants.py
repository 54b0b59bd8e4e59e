"""Whose is a request? Its tenant, of which fair orders and the metrics speak.

By default the tenant is the name of the API key, which a client cannot choose. A field or a header that names it
(`--tenant-from`) can be made up by whoever sends the request, so that is for servers behind a proxy that sets it.
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
        config: names of the keys, and where the tenant is read.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._of_keys = config.tenants
        self._without_key = OPERATOR if config.api_keys else ""  # where clients have keys, only operators have none
        kind, _, header = config.tenant_from.partition(":")
        self._reads_user = kind == "user"
        self._header = header
        self._header_name = header.lower().encode("ascii")

    def of(self, scope: Scope, user: str | None = None) -> str:
        """The tenant of a request; "" where clients have no keys and nothing else names it.

        Args:
            scope: of ASGI.
            user: the field of that name in its body; None: there is none, or the body has not arrived yet.

        Raises:
            ApiError: 400, the header is there more than once, or too long.
        """
        given = user if self._reads_user else self._in_header(scope["headers"]) if self._header else None
        if given:
            return given
        owner: int | None = scope.get(OWNER)
        return self._without_key if owner is None else self._of_keys[owner]

    def _in_header(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        values = [value for name, value in headers if name == self._header_name]
        if len(values) > 1:  # a client's own beside that of the proxy
            raise ApiError(400, f"the header {self._header} is there {len(values)} times; send it once")
        tenant = values[0].decode("latin-1").strip() if values else None
        if tenant and len(tenant) > MAX_USER_CHARACTERS:
            raise ApiError(
                400,
                f"the header {self._header} has {len(tenant)} characters, and at most {MAX_USER_CHARACTERS} are "
                "possible; shorten it",
            )
        return tenant


def isolated_salt(tenant: str, cache_salt: str | None) -> str:
    """The cache salt with which a tenant shares prefixes with itself alone, and only under an equal salt of its own.

    The length in front keeps two tenants apart whatever they are called and whatever salts they send.
    """
    own = "" if cache_salt is None else f":{cache_salt}"
    return f"{len(tenant)}:{tenant}{own}"
