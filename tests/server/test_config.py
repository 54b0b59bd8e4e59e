"""The server's own settings."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.server.config import ServerConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": ""}, "host is empty; give an address such as 127.0.0.1"),
        ({"port": 65536}, "port is 65536; it must be between 0 and 65535"),
        ({"port": "80"}, "port is '80'; it must be an integer"),
        ({"api_keys": ("ok", "")}, "an API key is empty"),
        ({"api_keys": ("schlüssel",)}, "characters other than ASCII"),
        ({"served_model_name": ("",)}, "a served model name is empty"),
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
        ({"drain_timeout": float("inf")}, "drain_timeout is inf; it must be 0 seconds or more"),
        ({"response_role": ""}, "response_role is empty"),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ServerConfig(**values)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_keys_are_not_in_the_message() -> None:
    with pytest.raises(ValueError) as caught:
        ServerConfig(api_keys=(" secret-key ",))
    assert "secret-key" not in str(caught.value)


def test_the_defaults_are_for_this_machine_alone() -> None:
    config = ServerConfig()
    assert (config.host, config.api_keys, config.log_requests) == ("127.0.0.1", (), False)
