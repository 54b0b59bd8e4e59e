"""Draw the moving picture of the README: a run in a short pool, stepped through on the page.

    python scripts/draw_page.py [--chromium PATH]

It becomes docs/films/steps.webp. Pages are drawn by Chromium, driven by Playwright (both are there for the tests).
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from pointsman.core import SchedulerConfig
from pointsman.core.observe.film import FilmRecorder
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest
from pointsman.web.film import Film
from pointsman.web.player import page_of
from pointsman.web.story import Teller

OUT = Path(__file__).resolve().parent.parent / "docs" / "films" / "steps.webp"
SIZE = {"width": 1200, "height": 880}
WIDTH = 900
"""Of the picture, in pixels; the page is drawn larger, as on a screen."""
FRAMES, MILLISECONDS, LAST = 20, 800, 3000
PROMPTS, OUTPUTS = (90, 40, 130, 60, 30, 100), (60, 90, 40, 70)


def film() -> bytes:
    """Ten requests, some with a common beginning, in a pool for about four: they wait, share, and one is preempted."""
    trace = [
        TraceRequest(
            0.03 * index,
            PROMPTS[index % len(PROMPTS)],
            OUTPUTS[index % len(OUTPUTS)],
            block_hash_ids=(index % 2, 100 + index),
            hash_block_size=32,
        )
        for index in range(10)
    ]
    config = SchedulerConfig(
        num_blocks=32, max_model_len=256, max_num_seqs=6, max_num_batched_tokens=96, full_sequence_must_fit=False
    )
    file = io.BytesIO()
    recorder = FilmRecorder(file)
    simulate(OpenLoop(trace), config, LinearStepTime(per_step=6e-3, per_token=8e-5), films=[recorder], is_stepping=True)
    recorder.close()
    return file.getvalue()


def shots(data: bytes, chromium: str) -> list[Image.Image]:
    """Pictures of steps around the first preemption."""
    read = Film(io.BytesIO(data))
    teller = Teller(read)
    preempted = next(
        index for index in range(len(read.frames)) if any("is preempted" in told for told in teller.decided(index))
    )
    first = max(0, preempted - FRAMES + 6)
    found = []
    with sync_playwright() as tool, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page_of(data, "Ten requests, a pool for four"), encoding="utf-8")
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(f"{path.as_uri()}#step={read.frames[first].step_id}")
        page.locator("[data-part=running] li").first.wait_for()
        for _ in range(FRAMES):
            page.wait_for_timeout(60)
            shot = Image.open(io.BytesIO(page.screenshot()))
            size = WIDTH, WIDTH * shot.height // shot.width
            found.append(shot.convert("RGB").resize(size, Image.Resampling.LANCZOS))
            page.click("[data-part=step]")
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    pictures = shots(film(), parser.parse_args().chromium)
    times = [MILLISECONDS] * (len(pictures) - 1) + [LAST]
    pictures[0].save(
        OUT, save_all=True, append_images=pictures[1:], duration=times, loop=0, lossless=True, quality=100, method=6
    )
    print(OUT, f"{OUT.stat().st_size:,} bytes, {len(pictures)} frames")


if __name__ == "__main__":
    main()
