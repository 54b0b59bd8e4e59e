"""Part h: logs step times of the large model for `pointsman calibrate`, and compares the simulator with a run.

Requests arrive in real time. One run is recorded and becomes a profile. The simulator then predicts another run, of
longer prompts and shorter outputs. The device's efficiency is a step's time by the datasheet, divided by its measured
time: for memory in decode steps, for arithmetic in steps with many prompt tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from _open_loop import TokenTimes, send
from calibration import measured, predicted

from gpu_check.models import (
    blocks_of,
    blocks_that_fit,
    fits,
    large_shape,
    make_engine,
    make_loaded,
    random_prompts,
)
from gpu_check.part import Setting
from gpu_check.steps import drain
from pointsman.core import SchedulerConfig
from pointsman.core.recording import Recorder
from pointsman.engine import Engine, SamplingParams
from pointsman.sim.calibrate import calibrate
from pointsman.sim.devices import Device, device
from pointsman.sim.errors import UnknownName
from pointsman.sim.model import ModelShape
from pointsman.sim.step_log import StepLog, read_steps
from pointsman.sim.step_time import Efficiencies, RooflineStepTime, StepLoad
from pointsman.traces import TraceRequest

NUM_REQUESTS, TINY_NUM_REQUESTS = 150, 24
NUM_PROBED = 48
"""Number of concurrent requests that measure the highest rate."""
CALIBRATED, PREDICTED = (300, 120, 0.6), (900, 60, 0.5)
"""Median tokens of prompts and outputs, and the share of the highest rate."""
MIN_PROMPT_TOKENS = 512
"""Minimum number of prompt tokens of a step that is bound by arithmetic."""
IDEAL = Efficiencies(memory=1.0, linear=1.0, attention=1.0, per_step=0.0, per_row=0.0)


def run(setting: Setting) -> None:
    """Run the part."""
    shape, findings = large_shape(setting.tiny), setting.findings
    if not fits(shape, setting.device):
        findings.skip(f"step times of {shape.name}", f"{shape.weight_bytes / 2**30:.1f} GiB of weights do not fit")
        return
    scale, count = (16, TINY_NUM_REQUESTS) if setting.tiny else (1, NUM_REQUESTS)
    longest = 4096 // scale
    max_num_seqs = 8 if setting.tiny else 128
    loaded = make_loaded(shape, setting.device)
    engine = make_engine(
        loaded,
        blocks_that_fit(shape, setting.device, max_num_seqs * blocks_of(longest) // 2),
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048 // scale,
        enable_prefix_caching=False,
        clock=monotonic,
    )
    with tempfile.TemporaryDirectory(prefix="gpu_check_log_") as folder:
        log = Path(folder) / "steps.jsonl"
        calibrated, others = (
            _requests(kind, scale, count, longest, seed) for seed, kind in enumerate((CALIBRATED, PREDICTED))
        )
        _serve(engine, shape, _at_rate(calibrated[:NUM_PROBED], float("inf"), 9), 9, None)  # compiles, allocates
        sent = []
        for number, (kind, requests) in enumerate(((CALIBRATED, calibrated), (PREDICTED, others))):
            probe = _at_rate(requests[:NUM_PROBED], float("inf"), number)
            tokens = _serve(engine, shape, probe, 20 + number, None)
            rate = kind[2] * len(probe) / max(map(max, tokens))
            findings.figure(f"requests a second, {'calibrated' if number == 0 else 'predicted'} run", round(rate, 3))
            sent.append(_at_rate(requests, rate, number))
        _serve(engine, shape, sent[0], 30, log)
        truth = measured(sent[1], _serve(engine, shape, sent[1], 31, None))
        found = calibrate(log)
        config = SchedulerConfig(**read_steps(log).config)
        simulated = predicted(found.profile.step_time, sent[1], config)
        findings.figure("steps of the log, error of held-out ones", found.profile.held_out_errors["step_mape"])
        for text in found.profile.notes:
            findings.note(f"calibrate: {text}")
        for name, value in truth.items():
            findings.row(
                "the simulator, calibrated with another run", figure=name, measured=value, simulated=simulated[name],
                error=simulated[name] / value - 1,
            )  # fmt: skip
        _efficiency(setting, shape, read_steps(log))
    engine.close()


def _requests(kind: tuple[int, int, float], scale: int, count: int, longest: int, seed: int) -> list[tuple[int, int]]:
    """Numbers of (prompt, output) tokens."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(kind[0] / scale), 0.6, count), 2, longest // 2).astype(int)
    outputs = np.clip(rng.lognormal(np.log(kind[1] / scale), 0.5, count), 3, longest // 4).astype(int)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def _at_rate(lengths: list[tuple[int, int]], rate: float, seed: int) -> list[TraceRequest]:
    """Requests at random moments with this rate; with an infinite rate all at once."""
    gaps = np.random.default_rng(100 + seed).exponential(1 / rate, len(lengths))
    moments = np.cumsum(gaps)
    return [TraceRequest(at, *each) for at, each in zip((moments - moments[0]).tolist(), lengths, strict=True)]


def _serve(engine: Engine, shape: ModelShape, sent: list[TraceRequest], seed: int, log: Path | None) -> TokenTimes:
    """Run requests at their times; returns the time of each token."""
    prompts = random_prompts(shape, [each.num_prompt_tokens for each in sent], seed)

    def add(number: int, late: float) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=sent[number].num_output_tokens, ignore_eos=True)
        engine.add_request(str(number), prompts[number], params, arrival_time=monotonic() - late)

    def step() -> list[tuple[int, int]]:
        return [(int(output.request_id), 1) for output in engine.step()]

    arrivals = [each.arrival_time for each in sent]
    if log is None:
        tokens = send(arrivals, add, step, engine.has_unfinished_requests)
    else:
        with log.open("w", encoding="utf-8") as file:
            engine.scheduler.start_recording(Recorder(file))
            try:
                tokens = send(arrivals, add, step, engine.has_unfinished_requests)
            finally:
                engine.scheduler.stop_recording()
    drain(engine)
    return tokens


def _efficiency(setting: Setting, shape: ModelShape, log: StepLog) -> None:
    """Report shares of the datasheet's figures, and the error of the estimate of `simulate --model --device`."""
    sheet = _datasheet(setting)
    if sheet is None:
        return
    loads = [StepLoad(*map(int, load)) for load in log.loads]
    ideal_time = RooflineStepTime(shape=shape, device=sheet, efficiencies=IDEAL)
    usual_time = RooflineStepTime(shape=shape, device=sheet)
    ideal = np.array([ideal_time.of_step(load) for load in loads])
    usual = np.array([usual_time.of_step(load) for load in loads])
    is_decode = np.array([load.num_tokens == load.num_rows for load in loads])
    is_prompt = np.array([load.num_tokens - load.num_rows >= MIN_PROMPT_TOKENS for load in loads])
    for name, chosen in (("memory, decode steps", is_decode), ("arithmetic, steps of prompts", is_prompt)):
        if chosen.any():
            share = float(np.median(ideal[chosen] / log.seconds[chosen]))
            setting.findings.figure(f"efficiency of {sheet.name}: {name}", round(share, 4))
        else:
            setting.findings.skip(f"efficiency of {sheet.name}: {name}", "the log has no such step")
    error = float(np.sum(usual) / np.sum(log.seconds) - 1)
    setting.findings.figure(f"estimate of all steps from the datasheet of {sheet.name}, error", round(error, 4))


def _datasheet(setting: Setting) -> Device | None:
    name: Any = "cpu" if not setting.on_gpu else torch.cuda.get_device_name()
    try:
        return device(name)
    except UnknownName:
        setting.findings.skip("efficiency", f"pointsman.sim.devices has no {name}")
        return None
