"""The server's own settings."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.server.config import ServerConfig, split_host


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": ""}, "host is empty; give an address such as 127.0.0.1"),
        ({"port": 65536}, "port is 65536; it must be between 0 and 65535"),
        ({"port": "80"}, "port is '80'; it must be an integer"),
        ({"api_keys": ("ok", "")}, "an API key is empty"),
        ({"api_keys": ("schlüssel",)}, "characters other than printable ASCII"),
        ({"operator_keys": ("ok", "")}, "an operator key is empty"),
        ({"operator_keys": ("schlüssel",)}, "characters other than printable ASCII"),
        ({"api_keys": ("a", "both"), "operator_keys": ("both",)}, "a key is both an API key and an operator key"),
        (
            {"allowed_host": ("gpu1", "http://gpu1")},
            "allowed_host is 'http://gpu1'; it must be a name or an IP address",
        ),
        ({"allowed_host": ("fd00::1",)}, "allowed_host is 'fd00::1'; it must be"),
        ({"allowed_host": ("",)}, "allowed_host is ''; it must be"),
        ({"allowed_host": ("*",)}, "allowed_host is '*'; it must be"),
        ({"served_model_name": ("",)}, "served_model_name has an empty name"),
        ({"max_waiting_requests": -1}, "max_waiting_requests is -1; it must be at least 0"),
        ({"max_waiting_prompt_tokens": 0}, "max_waiting_prompt_tokens is 0; it must be at least 1"),
        ({"max_request_bytes": 10}, "max_request_bytes is 10; it must be at least 1024"),
        ({"max_total_request_bytes": 10}, "max_total_request_bytes is 10; it must be at least 4194304"),
        ({"max_tokens_limit": 0}, "max_tokens_limit is 0; it must be at least 1"),
        ({"max_n": 0}, "max_n is 0; it must be at least 1"),
        ({"max_logprobs": True}, "max_logprobs is True; it must be an integer"),
        ({"max_deadline": 0.0}, "max_deadline is 0.0; it must be a number of seconds above 0"),
        ({"max_deadline": float("nan")}, "max_deadline is nan; it must be a number of seconds above 0"),
        ({"max_deadline": float("inf")}, "max_deadline is inf; it must be a number of seconds above 0"),
        (
            {"min_request_priority": 1},
            "min_request_priority is 1; it must be at most 0, which is the default priority",
        ),
        ({"min_request_priority": 0.5}, "min_request_priority is 0.5; it must be an integer"),
        (
            {"min_ttft_target": 0},
            "min_ttft_target is 0; it must be a number of seconds above 0; leave it out for no limit",
        ),
        ({"max_retention": float("nan")}, "max_retention is nan; it must be a number of seconds, at least 0"),
        ({"min_ttft_target": float("nan")}, "min_ttft_target is nan; it must be a number of seconds above 0"),
        ({"tenant_from": "header"}, "tenant_from is 'header'; it must be key, user, or header:NAME"),
        ({"tenant_from": "header:X Tenant"}, "tenant_from is 'header:X Tenant'; it must be key, user, or header:NAME"),
        ({"tenant_from": "keys"}, "tenant_from is 'keys'; it must be key, user, or header:NAME"),
        ({"api_key_names": ("a",)}, "api_key_names has 1 names for 0 API keys; give one name for each"),
        ({"api_keys": ("k",), "api_key_names": ("key-2",)}, "the name of API key 1 is key-2, a reserved name"),
        ({"api_keys": ("k",), "api_key_names": ("other",)}, "the name of API key 1 is other, a reserved name"),
        ({"drain_timeout": float("inf")}, "drain_timeout is inf; it must be 0 seconds or more"),
        ({"drain_delay": -1.0}, "drain_delay is -1.0; it must be 0 seconds or more"),
        ({"response_role": ""}, "response_role is empty"),
    ],
)
def test_error_names_the_value_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ServerConfig(**values)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_error_message_contains_no_key() -> None:
    with pytest.raises(ValueError) as caught:
        ServerConfig(api_keys=(" secret-key ",))
    assert "secret-key" not in str(caught.value)
    with pytest.raises(ValueError) as caught:
        ServerConfig(api_keys=("secret-key",), operator_keys=("secret-key",))
    assert "secret-key" not in str(caught.value) and "choose another operator key" in str(caught.value)
    with pytest.raises(ValueError, match="the name of API key 2 is not 1 to 64 letters") as caught:
        ServerConfig(api_keys=("a", "b"), api_key_names=("x", "secret/key"))
    assert "secret" not in str(caught.value)


def test_default_settings_serve_only_this_machine() -> None:
    config = ServerConfig()
    assert (config.host, config.api_keys, config.log_requests) == ("127.0.0.1", (), False)
    assert (config.operator_keys, config.allowed_host) == ((), ())


@pytest.mark.parametrize(
    ("host", "split"),
    [
        ("gpu1", ("gpu1", None)),
        ("GPU1.Example.com.:80", ("gpu1.example.com", 80)),
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("[::1]", ("::1", None)),
        ("[0:0::1]:65535", ("::1", 65535)),
        ("[::ffff:10.0.0.5]", ("10.0.0.5", None)),
        ("127.0.0.01", ("127.0.0.01", None)),  # an address for nobody
        *(
            (host, None)
            for host in ("", ":80", "::1", "[::1", "[gpu1]", "a b", "a/b", "a@b", "a:b", "a:80:80", "ä", "a\n")
        ),
    ],
)
def test_split_host_gives_name_and_port(host: str, split: tuple[str, int | None] | None) -> None:
    assert split_host(host) == split
