"""`pointsman play --sandbox`: it serves until Ctrl-C, and what is refused."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.cli.sandbox import commands
from pointsman.integrations.vllm.settings import read_settings
from pointsman.web.sandbox import Sandbox
from pointsman.web.situations import SITUATIONS
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused
from tests.cli.test_tune import served

Run = Callable[..., Finished]


@pytest.mark.e2e
def test_it_serves_until_ctrl_c(pointsman: Run, tmp_path: Path) -> None:
    """With the requests of a film."""
    film = tmp_path / "run.film"
    assert pointsman("simulate", "--requests", 7, "--seed", 1, "--film", film).code == 0
    command = [sys.executable, "-m", "pointsman", "play", film, "--sandbox"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().strip().partition("#token=")
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert b"Sandbox: run.film" in answer.read()
        ask = urllib.request.Request(f"{address}state", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(ask, timeout=30) as answer:
            assert len(json.load(answer)["requests"]) == 7
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, error) == (0, "")


def test_what_is_refused(pointsman: Run, tmp_path: Path) -> None:
    check_refused(pointsman("play"), "nothing to play", "--sandbox")
    check_refused(pointsman("play", "run.film", "--port", 8000), "--port is 8000", "--sandbox")
    check_refused(pointsman("play", "--sandbox", "--out", "x.html"), "--out", "leave one of them out")
    check_refused(pointsman("play", "a.film", "b.film", "--sandbox"), "b.film", "leave it out")
    check_refused(pointsman("play", "--sandbox", "--port", 65536), "--port is 65536", "65535")
    check_refused(pointsman("play", tmp_path / "none.film", "--sandbox"), "none.film")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check_refused(pointsman("play", "--sandbox", "--port", taken.getsockname()[1]), "choose another --port")


@pytest.mark.parametrize("name", [each.name for each in SITUATIONS])
def test_the_servers_take_the_settings_that_are_copied(name: str) -> None:
    """Before and after the change that a situation proposes; further policies with it."""
    sandbox = Sandbox()
    policies = {"victim": "least-cost:max_preemptions=3", "reserves": ["growth", "bypass:bound=4"]}
    for action in (
        {"do": "situation", "name": name},
        {"do": "what_if"},
        {"do": "settings", "settings": policies},
    ):
        sandbox.do(action)
        config = sandbox.scene.config
        lines = commands(config)
        arguments = served(lines["pointsman"])
        assert arguments["num_blocks"] == config.num_blocks
        for knob in arguments.keys() & config.to_dict().keys():
            value = arguments[knob]
            assert (tuple(value) if isinstance(value, list) else value) == getattr(config, knob), knob
        vllm = shlex.split(lines["vllm"])
        knobs = read_settings(json.loads(vllm[vllm.index("--additional-config") + 1])).knobs
        for knob, value in knobs.items():
            assert value == config.to_dict()[knob], knob
        for option, value in (("--max-num-seqs", config.max_num_seqs), ("--block-size", config.block_size)):
            assert vllm[vllm.index(option) + 1] == str(value)
        for option, is_on in (
            ("--no-enable-prefix-caching", config.enable_prefix_caching),
            ("--no-enable-chunked-prefill", config.enable_chunked_prefill),
        ):
            assert (option in vllm) != is_on
    assert (arguments["victim"], list(arguments["reserves"])) == (policies["victim"], policies["reserves"])
    assert (knobs["victim"], knobs["reserves"]) == (policies["victim"], policies["reserves"])
