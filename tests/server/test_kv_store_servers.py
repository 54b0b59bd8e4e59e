"""Servers with one KV store: one does the prefills, another one the decodes, as behind a router."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2 as httpx
import pytest
from _server_process import ServerProcess, wait_until

from tests.forked_engines import start_server

pytestmark = pytest.mark.e2e

SMALL = (
    "--model",
    "demo",
    "--max-model-len",
    "512",
    "--threads",
    "1",
    "--block-size",
    "16",
    "--log-stats-interval",
    "0",
)
PROMPTS = [
    f"import {word}\n\nclass {word.title()}:\n    def method(self):\n" * 8 for word in ("json", "os", "re", "abc")
]


def answer(server: ServerProcess, prompt: str, max_tokens: int) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def value(server: ServerProcess, name: str, transfer: str | None = None) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=20).text
    label = "" if transfer is None else f'[^}}]*transfer="{transfer}"'
    found = re.search(rf"^{name}{{{label}[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_one_server_prefills_and_another_one_decodes(tmp_path: Path) -> None:
    store = ("--kv-store", str(tmp_path))
    blocks = "pointsman:kv_transfer_blocks_total"
    with start_server(*SMALL, "--kv-offload-bytes", "8MiB") as alone:
        expected = [answer(alone, prompt, 16) for prompt in PROMPTS]
        assert value(alone, "vllm:external_prefix_cache_queries_total") > 100
    with (
        start_server(*SMALL, *store, "--kv-store-role", "producer") as prefill,
        start_server(*SMALL, *store, "--kv-store-role", "consumer", "--kv-load-timeout", "30") as decode,
    ):
        for prompt in PROMPTS[:2]:
            answer(prefill, prompt, 1)
        wait_until(lambda: value(prefill, "pointsman:kv_transfers") == 0, 20, "everything is written")
        assert [answer(decode, prompt, 16) for prompt in PROMPTS[:2]] == expected[:2]
        num_loaded = value(decode, blocks, "loaded")
        assert 0 < num_loaded <= value(prefill, blocks, "stored")
        assert value(decode, "vllm:external_prefix_cache_hits_total") == 16 * num_loaded
        assert value(decode, "pointsman:kv_transfers") == value(decode, "pointsman:kv_transfer_held_blocks") == 0
        for prompt in PROMPTS[2:]:
            answer(prefill, prompt, 1)
        assert prefill.stop() == 0, "pending writes come first"
        assert [answer(decode, prompt, 16) for prompt in PROMPTS[2:]] == expected[2:]
        assert value(decode, blocks, "loaded") > num_loaded
        assert value(decode, blocks, "not_loaded") == value(decode, blocks, "stored") == 0
        assert f"KV store: {tmp_path}" in decode.log()
