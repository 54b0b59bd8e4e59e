"""Speed and memory of a film in a browser.

A run of 2,000 requests in 50,000 steps is filmed, put into a page (`pointsman play`) and opened in Chromium. Measured
are the time until the first step is drawn, the time from the selection of a step until it is drawn (steps at random),
and the memory of the page's process beyond that of an empty page. Then an hour of the Azure conversation trace: the
size
of its film, and the time to show any step in the page and in Python.

Chromium is /usr/bin/chromium, or the program in the variable CHROMIUM; Playwright drives it. Without them the check
fails.

    python benchmarks/page.py --check
"""

from __future__ import annotations

import io
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from _common import AZURE_TRACE, Targets, argument_parser, finish, note, print_table, run

from pointsman.core import SchedulerConfig
from pointsman.core.observe.film import FilmRecorder
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest, read_trace
from pointsman.web.film import Film
from pointsman.web.player import page_of

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
STEP_TIME = LinearStepTime(per_step=6e-3, per_token=8e-5, per_context_token=4e-8)
NUM_REQUESTS, QUICK_REQUESTS = 2_000, 200
MEAN_OUTPUT, RATE = 200, 4.6  # about eight requests at once, so that 2,000 of them take 50,000 steps
NUM_SCRUBS = 40
FIRST_PAINT, SCRUB, MEMORY = 2.0, 0.1, 286.0  # seconds, seconds, MiB (300 MB)
EVENTS, BLOCKS = 1.0, 8.0  # MB of the Azure hour
SHOW = """async ([place]) => {
  const start = performance.now();
  await panes[0].view.showPlace(place);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start;
}"""


def filmed(trace: list[TraceRequest], config: SchedulerConfig, *, is_stepping: bool) -> tuple[bytes, dict[str, int]]:
    """The film of a simulation, and the bytes of its sections."""
    file = io.BytesIO()
    recorder = FilmRecorder(file)
    simulate(OpenLoop(trace), config, STEP_TIME, films=[recorder], is_stepping=is_stepping)
    recorder.close()
    return file.getvalue(), recorder.num_bytes


def made_run(num_requests: int) -> bytes:
    """A film step by step, as from a recording, in a pool that is short now and then."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1 / RATE, num_requests)).tolist()
    prompts = np.maximum(1, rng.lognormal(np.log(300), 0.8, num_requests)).astype(int).tolist()
    outputs = np.maximum(1, rng.exponential(MEAN_OUTPUT, num_requests)).astype(int).tolist()
    trace = [TraceRequest(*each) for each in zip(arrivals, prompts, outputs, strict=True)]
    config = SchedulerConfig(
        num_blocks=600, max_model_len=8_192, max_num_seqs=64, max_num_batched_tokens=2_048, full_sequence_must_fit=False
    )
    return filmed(trace, config, is_stepping=True)[0]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def renderers_mib(browser: Any) -> float:
    """Resident memory of the processes that draw pages."""
    session = browser.new_browser_cdp_session()
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    total = 0
    for process in found:
        if process["type"] == "renderer":
            status = Path(f"/proc/{process['id']}/status").read_text()
            total += int(status.split("VmRSS:")[1].split()[0])
    session.detach()
    return total / 1024


def shown(browser: Any, data: bytes) -> dict[str, float]:
    """Seconds until a film's page shows its first step, and from selecting others until they are drawn; and MiB."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page_of(data, "run"), encoding="utf-8")
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        before = renderers_mib(browser)
        start = perf_counter()
        page.goto(path.as_uri(), wait_until="commit")
        page.locator("[data-part=decided] li").first.wait_for()
        first_paint = perf_counter() - start
        num_steps = page.evaluate("panes[0].view.film.numSteps")
        rng = random.Random(1)
        scrubs = [page.evaluate(SHOW, [rng.randrange(num_steps)]) / 1e3 for _ in range(NUM_SCRUBS)]
        memory = renderers_mib(browser) - before
        context.close()
    return {
        "steps": num_steps,
        "first_paint": round(first_paint, 3),
        "scrub_p50": round(float(np.percentile(scrubs, 50)), 4),
        "scrub_p95": round(float(np.percentile(scrubs, 95)), 4),
        "memory_mib": round(memory, 1),
    }


def read_in_python(data: bytes) -> float:
    """CPU seconds to the state at a step, the 95th percentile of steps at random."""
    film, rng, seconds = Film(io.BytesIO(data)), random.Random(1), []
    for _ in range(NUM_SCRUBS):
        frame = rng.randrange(len(film.frames))
        start = process_time()
        film.state_at(frame)
        seconds.append(process_time() - start)
    return float(np.percentile(seconds, 95))


def measure_azure(browser: Any, targets: Targets) -> dict[str, Any]:
    """The hour of the Azure trace."""
    if not AZURE_TRACE.exists():
        targets.skip("the film of the Azure hour", f"no trace at {AZURE_TRACE}")
        return {}
    trace = [request for request in read_trace(AZURE_TRACE) if request.num_output_tokens]
    config = SchedulerConfig(
        num_blocks=20_000,
        max_model_len=16_384,
        max_num_seqs=256,
        max_num_batched_tokens=2_048,
        enable_prefix_caching=False,
    )
    data, sizes = filmed(trace, config, is_stepping=False)
    events, blocks = (sizes[name] / 1e6 for name in ("events", "blocks"))
    found = {"events_mb": round(events, 3), "blocks_mb": round(blocks, 3), "python_p95": round(read_in_python(data), 4)}
    found |= shown(browser, data)
    targets.at_most("MB of the Azure hour's decisions", events, EVENTS)
    targets.at_most("MB of the Azure hour's blocks", blocks, BLOCKS)
    targets.at_most("CPU seconds to a step of the Azure hour in Python", found["python_p95"], SCRUB)
    targets.at_most("seconds to a step of the Azure hour in the page", found["scrub_p95"], SCRUB)
    return found


def main() -> int:
    arguments = argument_parser(__doc__ or "").parse_args()
    targets, figures = Targets(), dict[str, Any]()
    try:
        import playwright  # noqa: F401

        missing = None if shutil.which(CHROMIUM) else f"{CHROMIUM} is not there"
    except ImportError:
        missing = "Playwright is not installed (pip install playwright)"
    if missing is not None:
        targets.holds(f"a page is shown in a real browser: {missing}", False)
        return finish("page", figures, targets, arguments.check)
    with chromium() as browser:
        data = made_run(QUICK_REQUESTS if arguments.quick else NUM_REQUESTS)
        found = figures["run"] = shown(browser, data) | {"film_mb": round(len(data) / 1e6, 3)}
        targets.at_most("seconds until the first step is drawn", found["first_paint"], FIRST_PAINT)
        targets.at_most("seconds from asking for a step until it is drawn", found["scrub_p95"], SCRUB)
        targets.at_most("MiB of the page", found["memory_mib"], MEMORY)
        rows = [("made", found)]
        if arguments.quick:
            note("the Azure hour is left out: it takes a minute")
            targets.skip("the film of the Azure hour", "--quick")
        elif azure := measure_azure(browser, targets):
            figures["azure"] = azure
            rows.append(("Azure hour", azure))
    print_table(
        "A film in Chromium (seconds, MiB)",
        ["run", "steps", "first step", "any step, p50", "p95", "memory"],
        [
            [
                name,
                f"{each['steps']:,}",
                *[each[key] for key in ("first_paint", "scrub_p50", "scrub_p95", "memory_mib")],
            ]
            for name, each in rows
        ],
    )
    return finish("page", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
