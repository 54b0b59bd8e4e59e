"""Do policies do in real engines what the simulator says? The bundled engine, and vLLM with this scheduler.

Two scenes on the demo model, each under the default and under a policy, in real time:

    tenants     one tenant sends 60 requests at once, another one a short request every 0.3 s: order fcfs, and fair.
                The figure is the mean TTFT of the light tenant
    documents   chats decode while prompts of 400 tokens arrive: a budget of 512, and target-itl with 1.5 times the
                usual gap. The figure is the longest gap of a chat (ITL), the mean over the chats

Runs take turns; figures are medians of the rounds. The simulator runs the same requests, with step times fitted to the
bundled engine's default run. In each of the three the policy must better the figure by at least a tenth.

    python benchmarks/policies_live.py --check
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import numpy as np
import torch
from _common import REPOSITORY, Targets, argument_parser, finish, note, print_table, run
from _open_loop import TokenTimes, send
from _worker_process import WorkerProcess
from vllm_env import is_complete, python_of

from pointsman.core import SchedulerConfig
from pointsman.core.recording import Recorder
from pointsman.engine import Engine, SamplingParams
from pointsman.sim.calibrate import calibrate_steps
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import simulate
from pointsman.sim.step_log import read_steps
from pointsman.sim.stretches import Stretch

MAX_MODEL_LEN = 512
BETTER = 0.9
"""The figure under the policy, of that under the default, at most."""
ROUNDS, ROUNDS_QUICK = 3, 1
DEMO = REPOSITORY / "pointsman" / "engine" / "demo"
WORKER = Path(__file__).resolve().parent / "_vllm_calibration_worker.py"
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
    """Requests, settings, and what is looked at."""

    name: str
    figure: str
    sent: Sequence[Sent]
    settings: Mapping[str, int]
    policy: Callable[[float], dict[str, Any]]
    """Settings of the policy, for the usual gap between two tokens in seconds."""
    read: Callable[[Sequence[Sent], Any, Any], float]
    """Of the first token of each request, in seconds from the start, and of its longest gap."""


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


def prompts_of(sent: Sequence[Sent], vocab_size: int, seed: int) -> list[list[int]]:
    """Random tokens, so that nothing is shared."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, vocab_size, size=each.num_prompt_tokens).tolist() for each in sent]


class BundledEngine:
    """The bundled engine, in this process.

    Args:
        settings: of its scheduler, policies included.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.engine = Engine("demo", num_threads=1, max_model_len=MAX_MODEL_LEN, num_blocks=512, **settings)
        self._num_sent = 0

    def serve(self, sent: Sequence[Sent], seed: int) -> TokenTimes:
        engine, first = self.engine, self._num_sent
        self._num_sent += len(sent)
        prompts = prompts_of(sent, int(engine.model_config.vocab_size), seed)

        def add(number: int, late: float) -> None:
            each = sent[number]
            params = SamplingParams(temperature=0.0, max_tokens=each.num_output_tokens, ignore_eos=True)
            name, arrival = str(first + number), monotonic() - late
            engine.add_request(name, prompts[number], params, arrival_time=arrival, tenant=each.tenant)

        def step() -> list[tuple[int, int]]:
            return [(int(output.request_id) - first, 1) for output in engine.step()]

        tokens = send([each.arrival for each in sent], add, step, engine.has_unfinished_requests)
        while not engine.scheduler.is_idle:
            engine.step()  # the last ends are reported by an empty step
        return tokens

    def recorded(self, sent: Sequence[Sent], seed: int) -> str:
        """As `serve`; the recording."""
        lines = io.StringIO()
        self.engine.scheduler.start_recording(Recorder(lines))
        self.serve(sent, seed)
        self.engine.scheduler.stop_recording()
        return lines.getvalue()

    def close(self) -> None:
        """Nothing is to be ended."""


class Vllm:
    """vLLM with this scheduler, in a process of its own.

    Args:
        settings: as for `BundledEngine`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        environment = {
            "PYTHONPATH": f"{REPOSITORY}:{WORKER.parent}",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        own = {name: settings[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
        policies = {name: value for name, value in settings.items() if name not in own}
        self._worker = WorkerProcess("vllm", [python_of(), WORKER], environment)
        self._worker.ask(
            "open",
            300,
            model=str(DEMO),
            scheduler=SCHEDULER,
            additional={"socket": "", **policies},
            settings={"max_model_len": MAX_MODEL_LEN, "block_size": 32, **own},
        )

    def serve(self, sent: Sequence[Sent], seed: int) -> TokenTimes:
        told = self._worker.ask(
            "run",
            600,
            arrivals=[each.arrival for each in sent],
            prompts=prompts_of(sent, 2048, seed),
            num_output_tokens=[each.num_output_tokens for each in sent],
            tenants=[each.tenant for each in sent],
        )
        return list(told["tokens"])

    def close(self) -> None:
        self._worker.close()


def measured(scene: Scene, host: type[BundledEngine] | type[Vllm], rounds: int) -> tuple[float, float, float]:
    """(default, policy, usual gap): medians of the rounds, which take turns."""
    plain = host(scene.settings)
    plain.serve(scene.sent, 0)  # compiles, allocates
    gap = _usual_gap(plain.serve(scene.sent, 1))
    other = host({**scene.settings, **scene.policy(gap)})
    other.serve(scene.sent, 2)  # learns
    pairs = []
    for number in range(rounds):
        before, after = (each.serve(scene.sent, 10 + 2 * number + index) for index, each in enumerate((plain, other)))
        pairs.append((_read(scene, before), _read(scene, after)))
    plain.close()
    other.close()
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), gap


def simulated(scene: Scene, gap: float) -> tuple[float, float]:
    """(default, policy) under step times of the bundled engine."""
    engine = BundledEngine(scene.settings)
    engine.serve(scene.sent, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        path.write_text(engine.recorded(scene.sent, 1), encoding="utf-8")
        log = read_steps(path)
    step_time = calibrate_steps(log, "live").profile.step_time
    config = SchedulerConfig(**log.config)
    found = []
    for policy in ({}, scene.policy(gap)):
        # Twice, the second time after the first, so that what learns has learned.
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
        before, after, gap = measured(scene, BundledEngine, ROUNDS_QUICK if quick else ROUNDS)
        figures["bundled engine"] = before, after
        figures["simulator"] = simulated(scene, gap)
        if quick or not is_complete():
            targets.skip(f"{scene.name}, vLLM", "--quick" if quick else "no environment for vLLM")
        else:
            figures["vLLM"] = measured(scene, Vllm, ROUNDS)[:2]
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
