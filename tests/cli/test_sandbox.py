"""`pointsman sandbox`: it serves until Ctrl-C, and refuses wrong options."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pointsman.cli.sandbox import commands, scene_of
from pointsman.core import SchedulerConfig
from pointsman.integrations.vllm.settings import read_settings
from pointsman.web.sandbox import Sandbox
from pointsman.web.scene import play
from pointsman.web.situations import SITUATIONS
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused
from tests.cli.test_tune import served

Run = Callable[..., Finished]


@pytest.mark.e2e
def test_the_sandbox_serves_until_ctrl_c(pointsman: Run, tmp_path: Path) -> None:
    """The sandbox starts with the requests of a film."""
    film = tmp_path / "run.film"
    assert pointsman("simulate", "--requests", 7, "--seed", 1, "--film", film).code == 0
    command = [sys.executable, "-m", "pointsman", "sandbox", film]
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


def test_wrong_sandbox_options_are_refused(pointsman: Run, tmp_path: Path) -> None:
    check_refused(pointsman("sandbox", "a.film", "b.film"), "b.film")
    check_refused(pointsman("sandbox", "--port", 65536), "--port is 65536", "65535")
    check_refused(pointsman("sandbox", tmp_path / "none.film"), "none.film")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check_refused(pointsman("sandbox", "--port", taken.getsockname()[1]), "choose another --port")


def lines_of(text: str) -> list[str]:
    """The copied command lines: of vLLM, of pointsman."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_copied_commands_contain_only_the_changed_settings() -> None:
    """The commands include a setting that returns to its default."""
    base = SchedulerConfig(num_blocks=1200, max_model_len=40960, watermark=0.04, reserves=("growth",))
    assert commands(base, base)["change"].startswith("# no setting of a server differs")
    now = base.replace(watermark=0.0, reserves=("growth", "bypass:bound=4"), enable_chunked_prefill=False)
    vllm, ours = lines_of(commands(now, base)["change"])
    assert shlex.split(vllm) == [
        *("vllm", "serve", "MODEL", "--no-enable-chunked-prefill", "--watermark", "0.0"),
        *("--scheduler-cls", "pointsman.integrations.vllm.Scheduler"),
        *("--additional-config", '{"pointsman": {"reserves": ["growth", "bypass:bound=4"]}}'),
    ]
    arguments = served(ours)
    assert (arguments["watermark"], list(arguments["reserves"])) == (0.0, ["growth", "bypass:bound=4"])
    assert arguments["enable_chunked_prefill"] is False and arguments.get("num_blocks") is None
    vllm, ours = lines_of(commands(base.replace(num_blocks=1300), base)["change"])
    assert "--num-gpu-blocks-override 1301" in vllm and "--num-blocks 1300" in ours
    every = commands(base, base)["all"]
    assert "# the pool holds 19,200 tokens, and --max-model-len is 40,960: vLLM does not start so" in every
    assert "# the pool" not in commands(base.replace(num_blocks=2560), base)["all"]


def test_the_sandbox_states_how_closely_a_scene_matches_its_film(pointsman: Run, tmp_path: Path) -> None:
    film = tmp_path / "run.film"
    assert pointsman("simulate", "--requests", 20, "--seed", 1, "--film", film).code == 0
    scene, about = scene_of(film)
    assert "From run.film: the same requests and settings. A step takes " in about
    played = play(replace(scene, to_the_end=True))
    assert f"this takes {played.now:,.1f} s and {played.num_steps:,} steps with 0 preemptions, where run.film" in about


@pytest.mark.parametrize("name", [each.name for each in SITUATIONS])
def test_servers_accept_the_copied_settings(name: str) -> None:
    """The settings of each situation, with and without the proposed change, and settings with further policies."""
    sandbox = Sandbox()
    policies = {"victim": "least-cost:max_preemptions=3", "reserves": ["growth", "bypass:bound=4"]}
    for action in (
        {"do": "situation", "name": name},
        {"do": "what_if"},
        {"do": "settings", "settings": policies},
    ):
        sandbox.do(action)
        config = sandbox.scene.config
        vllm_line, line = lines_of(commands(config, config)["all"])
        arguments = served(line)
        assert arguments["num_blocks"] == config.num_blocks
        for knob in arguments.keys() & config.to_dict().keys():
            value = arguments[knob]
            assert (tuple(value) if isinstance(value, list) else value) == getattr(config, knob), knob
        vllm = shlex.split(vllm_line)
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
