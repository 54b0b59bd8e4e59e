"""Policies in real engines compared with the simulator: the bundled engine, and vLLM with this scheduler.

Two scenes on the demo model, each under the default and under a policy, in real time:

    tenants     one tenant sends 60 requests at once, another one a short request every 0.3 s: order fcfs, and fair.
                The figure is the mean TTFT of the light tenant
    documents   chats decode while prompts of 400 tokens arrive: a budget of 512, and target-itl with 1.5 times the
                usual gap. The figure is the longest gap of a chat (ITL), the mean over the chats

Runs alternate; figures are medians of the rounds. The simulator runs the same requests, with step times fitted to the
bundled engine's default run. In each of the three the policy must improve the figure by at least a tenth.

    python benchmarks/policies_live.py --check
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _common import Targets, argument_parser, finish, note, print_table, run
from _live_engines import DEMO, BundledEngine, Vllm, prompts_of
from _open_loop import TokenTimes
from vllm_env import is_complete

from pointsman.core import SchedulerConfig
from pointsman.core.recording import Recorder
from pointsman.sim.calibrate import calibrate_steps
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import simulate
from pointsman.sim.step_log import read_steps
from pointsman.sim.stretches import Stretch

MAX_MODEL_LEN = 512
BETTER = 0.9
"""Maximum of the figure under the policy, as a share of the default's."""
ROUNDS, ROUNDS_QUICK = 3, 1
VOCAB_SIZE = 2048
"""Of the demo model."""
SCHEDULER = "pointsman.integrations.vllm.Scheduler"


@dataclass(frozen=True)
class Sent:
    """A request of a scene."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str


@dataclass(frozen=True)
class Scene:
    """Requests, settings, and the figure of a scene."""

    name: str
    figure: str
    sent: Sequence[Sent]
    settings: Mapping[str, int]
    policy: Callable[[float], dict[str, Any]]
    """Settings of the policy, for the usual gap between two tokens in seconds."""
    read: Callable[[Sequence[Sent], Any, Any], float]
    """Computes the figure from the first token of each request, in seconds from the start, and its longest gap."""


def _light_ttft(sent: Sequence[Sent], first: Any, longest: Any) -> float:
    return float(np.mean([at - each.arrival for each, at in zip(sent, first, strict=True) if each.tenant == "light"]))


def _chat_gap(sent: Sequence[Sent], first: Any, longest: Any) -> float:
    return float(np.mean([gap for each, gap in zip(sent, longest, strict=True) if each.tenant == "chat"]))


def _read(scene: Scene, tokens: TokenTimes) -> float:
    return scene.read(
        scene.sent, [times[0] for times in tokens], [max(np.diff(times), default=0.0) for times in tokens]
    )


def _usual_gap(tokens: TokenTimes) -> float:
    return float(np.median(np.concatenate([np.diff(times) for times in tokens])))


def _flood() -> list[Sent]:
    heavy = [Sent(0.0, 60, 40, "heavy") for _ in range(60)]
    return sorted([*heavy, *(Sent(0.05 + 0.3 * n, 30, 8, "light") for n in range(8))], key=lambda each: each.arrival)


def _chats_and_documents() -> list[Sent]:
    chats = [Sent(0.1 * n, 20, 150, "chat") for n in range(12)]
    return sorted(
        [*chats, *(Sent(0.4 + 0.25 * n, 400, 2, "document") for n in range(10))], key=lambda each: each.arrival
    )


SCENES = (
    Scene(
        "tenants",
        "light tenant's mean TTFT, s",
        _flood(),
        {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        lambda gap: {"order": "fair"},
        _light_ttft,
    ),
    Scene(
        "documents",
        "chats' longest gap, s",
        _chats_and_documents(),
        {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        lambda gap: {"token_limits": [f"target-itl:seconds={1.5 * gap:.6f},least=8"]},
        _chat_gap,
    ),
)


def bundled_engine(settings: Mapping[str, Any]) -> BundledEngine:
    """The bundled engine with these settings of the scheduler, policies included."""
    return BundledEngine("demo", {"num_threads": 1, "max_model_len": MAX_MODEL_LEN, "num_blocks": 512, **settings})


def vllm(settings: Mapping[str, Any]) -> Vllm:
    """vLLM with this scheduler, and the same settings."""
    flags = {name: settings[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    policies = {name: value for name, value in settings.items() if name not in flags}
    flags["max_model_len"] = MAX_MODEL_LEN
    return Vllm(DEMO, flags, scheduler=SCHEDULER, additional={"socket": "", **policies})


def serve(host: BundledEngine | Vllm, sent: Sequence[Sent], seed: int) -> TokenTimes:
    """The requests of a scene, with prompts that share nothing."""
    return host.serve(
        [each.arrival for each in sent],
        prompts_of(sent, VOCAB_SIZE, seed),
        [each.num_output_tokens for each in sent],
        [each.tenant for each in sent],
    )


def measured(
    scene: Scene, make: Callable[[Mapping[str, Any]], BundledEngine | Vllm], rounds: int
) -> tuple[float, float, float]:
    """(default, policy, usual gap): medians of the rounds, which alternate."""
    plain = make(scene.settings)
    serve(plain, scene.sent, 0)  # compiles, allocates
    gap = _usual_gap(serve(plain, scene.sent, 1))
    other = make({**scene.settings, **scene.policy(gap)})
    serve(other, scene.sent, 2)  # learns
    pairs = []
    for number in range(rounds):
        before, after = (serve(each, scene.sent, 10 + 2 * number + index) for index, each in enumerate((plain, other)))
        pairs.append((_read(scene, before), _read(scene, after)))
    plain.close()
    other.close()
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), gap


def simulated(scene: Scene, gap: float) -> tuple[float, float]:
    """(default, policy) under step times of the bundled engine."""
    host = bundled_engine(scene.settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        with path.open("w", encoding="utf-8") as file:
            host.engine.scheduler.start_recording(Recorder(file))
            serve(host, scene.sent, 1)
            host.engine.scheduler.stop_recording()
        log = read_steps(path)
    step_time = calibrate_steps(log, "live").profile.step_time
    config = SchedulerConfig(**log.config)
    found = []
    for policy in ({}, scene.policy(gap)):
        # Twice: in the second run, policies that learn have learned from the first.
        length = max(each.arrival for each in scene.sent) + 30.0
        arrivals = tuple(
            (again * length + each.arrival, _simulated_request(each, again * len(scene.sent) + number))
            for again in (0, 1)
            for number, each in enumerate(scene.sent)
        )
        timings = simulate(Stretch(arrivals, 2 * length), config.replace(**policy), step_time).timings
        second = slice(len(scene.sent), None)
        found.append(scene.read(scene.sent, timings.first_token[second] - length, timings.max_gap[second]))
    return found[0], found[1]


def _simulated_request(sent: Sent, index: int) -> SimRequest:
    return SimRequest(f"r{index}", sent.num_prompt_tokens, sent.num_output_tokens, index=index, tenant=sent.tenant)


def main() -> int:
    parser = argument_parser(__doc__ or "")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quick, targets = arguments.quick, Targets()
    rows: list[list[object]] = []
    result: dict[str, Any] = {"quick": quick}
    for scene in SCENES:
        figures: dict[str, tuple[float, float]] = {}
        before, after, gap = measured(scene, bundled_engine, ROUNDS_QUICK if quick else ROUNDS)
        figures["bundled engine"] = before, after
        figures["simulator"] = simulated(scene, gap)
        if quick or not is_complete():
            targets.skip(f"{scene.name}, vLLM", "--quick" if quick else "no environment for vLLM")
        else:
            figures["vLLM"] = measured(scene, vllm, ROUNDS)[:2]
        for host, (default, policy) in figures.items():
            rows.append([scene.name, host, scene.figure, default, policy, policy / default])
            targets.at_most(f"{scene.name}, {host}: policy / default", round(policy / default, 3), BETTER)
        result[scene.name] = {host: {"default": one, "policy": two} for host, (one, two) in figures.items()}
        note(f"{scene.name}: {', '.join(figures)} done; the usual gap is {1000 * gap:.1f} ms")
    header = ["scene", "host", "figure", "default", "policy", "ratio"]
    print_table("Policies in real engines and in the simulator", header, rows)
    return finish("policies_live", result, targets, arguments.check)


if __name__ == "__main__":
    run(main)
