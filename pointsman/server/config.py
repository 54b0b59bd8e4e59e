"""The operator's settings of the server itself. Settings of engine and scheduler are keyword arguments of `Engine`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the server. Immutable, checked when built.

    Raises:
        ValueError: a value is out of range; the message is one line with the value, the limit and the remedy.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all networks of the machine."""
    port: int = 8000
    """Port to listen on; 0: any free port."""
    api_keys: tuple[str, ...] = ()
    """API keys; clients must send one of them. Empty: clients need no key."""
    api_key_names: tuple[str, ...] = ()
    """The tenant's name for each API key; keys of the same tenant have the same name. A key whose name is empty, and
    every key if no names are given, is named by its position, from "key-1" on."""
    tenant_from: str = "key"
    """Source of a request's tenant: "key": the name of the request's key; "user": the field `user` of the body;
    "header:NAME": that header. Without that field or header the tenant is the name of the key. Clients choose the field
    and the header freely, so a trusted proxy should set them."""
    operator_keys: tuple[str, ...] = ()
    """Operator keys; operators' endpoints require one of them, clients' endpoints accept it. Empty: if clients have
    keys, no request counts as an operator's; otherwise every request from a program on this machine does."""
    allowed_host: tuple[str, ...] = ()
    """Further names that the Host header of operators' and browsers' requests may have; a name without a port matches
    any port."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients; responses have the first. Empty: the model's name as given to the engine."""
    max_connections: int | None = None
    """Maximum number of client connections. At the limit, a new connection replaces one that waits for its client;
    if no connection waits, the new one gets 503. None: 4096, or fewer if the process may not open that many files."""
    max_connections_per_address: int | None = None
    """Maximum number of connections from one address; None: no limit, as all clients behind a proxy have its
    address."""
    max_waiting_requests: int = 1024
    """Maximum number of open requests in addition to those that can run concurrently; further requests get 429."""
    max_waiting_prompt_tokens: int | None = None
    """Maximum number of prompt tokens of all requests without a first token; None: no limit. While no other prompt
    waits, a request of any length is accepted."""
    max_request_bytes: int = 4 * MIB
    """Maximum size of a request's body, in bytes; larger bodies get 413."""
    max_total_request_bytes: int | None = None
    """Maximum size of all bodies that are arriving or not parsed yet, in bytes; further bodies get 429. None: 16 times
    `max_request_bytes`."""
    max_waiting_characters: int | None = None
    """Maximum number of characters that wait to be tokenized; further requests get 429. None: 4 times
    `max_request_bytes`."""
    isolate_prefixes: bool = False
    """Whether tenants share no cached prefixes, so that no tenant can find out the prompts of another."""
    max_tokens_limit: int | None = None
    """Maximum `max_tokens` of a request; None: the model's maximum length."""
    max_n: int = 16
    """Maximum number of samples per prompt."""
    max_logprobs: int = 20
    """Maximum number of log probabilities per position."""
    max_deadline: float | None = None
    """Maximum deadline of every request, in seconds after arrival; None: no limit."""
    min_request_priority: int | None = None
    """Minimum (most urgent) priority that a client may request, at most 0; None: no limit."""
    min_ttft_target: float | None = None
    """Minimum TTFT target that a client may request, in seconds; None: no limit."""
    max_retention: float = 600.0
    """Maximum retention that a client may request, in seconds."""
    drain_delay: float = 0.0
    """Seconds after SIGTERM in which the server reports that it is not ready, but still accepts requests."""
    drain_timeout: float = 30.0
    """Seconds that open requests have to finish after `drain_delay`."""
    chat_template: str | None = None
    """A chat template (Jinja) that replaces the tokenizer's own."""
    response_role: str = "assistant"
    """Role of the message in a chat completion."""
    log_requests: bool = False
    """Whether prompts appear in the log."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for every network")
        _check_int("port", self.port, 0, 65535)
        for kind, keys in (("API key", self.api_keys), ("operator key", self.operator_keys)):
            if not all(map(is_key, keys)):
                raise ValueError(
                    f"an {kind} is empty, begins or ends with a space, or has characters other than printable ASCII; "
                    "correct it"
                )
        if set(self.api_keys) & set(self.operator_keys):
            raise ValueError(
                "a key is both an API key and an operator key, so each client with it is an operator; choose another "
                "operator key"
            )
        self._check_tenants()
        for host in self.allowed_host:
            if split_host(host) is None:
                raise ValueError(
                    f"allowed_host is {host!r}; it must be a name or an IP address, as in gpu1, gpu1:8000 or [::1]:8000"
                )
        if any(not name for name in self.served_model_name):
            raise ValueError("served_model_name has an empty name; give each name at least one character")
        for bound, number in (
            ("max_connections", self.max_connections),
            ("max_connections_per_address", self.max_connections_per_address),
        ):
            if number is not None:
                _check_int(bound, number, 1)
        _check_int("max_waiting_requests", self.max_waiting_requests, 0)
        if self.max_waiting_prompt_tokens is not None:
            _check_int("max_waiting_prompt_tokens", self.max_waiting_prompt_tokens, 1)
        _check_int("max_request_bytes", self.max_request_bytes, 1024)
        if self.max_total_request_bytes is not None:
            _check_int("max_total_request_bytes", self.max_total_request_bytes, self.max_request_bytes)
        if self.max_waiting_characters is not None:
            _check_int("max_waiting_characters", self.max_waiting_characters, self.max_request_bytes)
        if self.max_tokens_limit is not None:
            _check_int("max_tokens_limit", self.max_tokens_limit, 1)
        _check_int("max_n", self.max_n, 1)
        _check_int("max_logprobs", self.max_logprobs, 0)
        if self.max_deadline is not None and not 0 < self.max_deadline < math.inf:
            raise ValueError(
                f"max_deadline is {self.max_deadline}; it must be a number of seconds above 0; leave it out for no "
                "limit"
            )
        if self.min_request_priority is not None:
            _check_int("min_request_priority", self.min_request_priority, -(2**63))
            if self.min_request_priority > 0:
                raise ValueError(
                    f"min_request_priority is {self.min_request_priority}; it must be at most 0, which is the "
                    "default priority of a request"
                )
        if self.min_ttft_target is not None and not 0 < self.min_ttft_target < math.inf:
            raise ValueError(
                f"min_ttft_target is {self.min_ttft_target}; it must be a number of seconds above 0; leave it out "
                "for no limit"
            )
        if not 0 <= self.max_retention < math.inf:
            raise ValueError(f"max_retention is {self.max_retention}; it must be a number of seconds, at least 0")
        for name, seconds in (("drain_delay", self.drain_delay), ("drain_timeout", self.drain_timeout)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{name} is {seconds}; it must be 0 seconds or more")
        if not self.response_role:
            raise ValueError("response_role is empty; give a role such as assistant")

    def _check_tenants(self) -> None:
        names, num_keys = self.api_key_names, len(self.api_keys)
        if names and len(names) != num_keys:
            raise ValueError(
                f"api_key_names has {len(names)} names for {num_keys} API keys; give one name for each key"
            )
        for place, name in enumerate(names, 1):
            # The name itself is not shown: it may be part of a key that contains a colon.
            if name and _TENANT.fullmatch(name) is None:
                raise ValueError(
                    f"the name of API key {place} is not 1 to 64 letters, digits, '.', '_' and '-'; correct the "
                    "text before the first colon of the key"
                )
            if _RESERVED.fullmatch(name):
                raise ValueError(f"the name of API key {place} is {name}, a reserved name; choose another name")
        kind, _, header = self.tenant_from.partition(":")
        if self.tenant_from not in ("key", "user") and not (kind == "header" and _HEADER.fullmatch(header)):
            raise ValueError(f"tenant_from is {self.tenant_from!r}; it must be key, user, or header:NAME")
        if header.lower() in _SECRET_HEADERS:
            raise ValueError(
                f"tenant_from is {self.tenant_from!r}, a header with a secret, and tenants are shown in metrics; name "
                "another header"
            )

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenant of each API key."""
        names = self.api_key_names or ("",) * len(self.api_keys)
        return tuple([name or f"key-{place}" for place, name in enumerate(names, 1)])

    @property
    def body_budget(self) -> int:
        """Maximum size of all bodies that are arriving or not parsed yet, in bytes: `max_total_request_bytes` or its
        default."""
        return 16 * self.max_request_bytes if self.max_total_request_bytes is None else self.max_total_request_bytes

    @property
    def text_budget(self) -> int:
        """Maximum number of characters that wait to be tokenized: `max_waiting_characters` or its default. It is at
        least `max_request_bytes`. A text has at most as many characters as bytes, so the text of the largest body
        always fits."""
        return 4 * self.max_request_bytes if self.max_waiting_characters is None else self.max_waiting_characters


def split_host(host: str) -> tuple[str, int | None] | None:
    """The normalized name or address of a Host header, and its port. None: the header is neither a name nor an address.

    IPv6 addresses have no brackets; an IPv4-mapped IPv6 address becomes the IPv4 address.
    """
    if (found := _HOST.fullmatch(host)) is None:
        return None
    name, address, port = found.groups()
    try:
        name = plain_address(address) if address else plain_address(name)
    except ValueError:
        if address:
            return None
        name = name.lower().removesuffix(".")
    return name, int(port) if port else None


def plain_address(address: str) -> str:
    """Returns an IP address in the form in which `split_host` returns addresses.

    Raises:
        ValueError: `address` is not an IP address.
    """
    parsed = ip_address(address.partition("%")[0])
    return str(parsed.ipv4_mapped or parsed) if isinstance(parsed, IPv6Address) else str(parsed)


OPERATOR = "operator"
"""The tenant of requests with an operator's key, if clients have keys."""
OTHER = "other"
"""Value of the label `tenant` in metrics, for all tenants without series of their own (`metrics/tenants.py`)."""

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
_RESERVED = re.compile(rf"key-[0-9]+|{OPERATOR}|{OTHER}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HOST = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+)\])(?::([0-9]{1,5}))?")


def is_key(key: str) -> bool:
    """Whether a text can be an API key or an operator key."""
    return bool(key) and key == key.strip() and key.isascii() and key.isprintable()


def _check_int(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {minimum}")
    if value < minimum or (maximum is not None and value > maximum):
        limit = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name} is {value}; it must be {limit}")
