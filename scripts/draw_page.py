"""Draws the README's animation of a run in a small pool, and the pictures of the guides to films and to the sandbox.

    python scripts/draw_page.py [--chromium PATH]

It writes docs/films/*.png and steps.webp. Chromium, driven by Playwright, renders the pages (the tests need both too).
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from pointsman.core import SchedulerConfig
from pointsman.core.observe.film import FilmRecorder
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest
from pointsman.web.film import Film
from pointsman.web.player import page_of
from pointsman.web.sandbox import Sandbox
from pointsman.web.sandbox_page import sandbox_server
from pointsman.web.story import Teller

OUT = Path(__file__).resolve().parent.parent / "docs" / "films"
COMPARED = ("--requests", "60", "--num-blocks", "400", "--max-num-seqs", "8")
"""Options of the comparison of static and continuous batching in docs/guides/film_a_run.md."""
SIZE = {"width": 1200, "height": 880}
WIDTH = 900
"""Width of the picture in pixels; the page is rendered larger, as on a screen."""
FRAMES, MILLISECONDS, LAST = 20, 800, 3000
PROMPTS, OUTPUTS = (90, 40, 130, 60, 30, 100), (60, 90, 40, 70)


def film() -> bytes:
    """A film of ten requests, some with a common prefix, in a pool for about four: they wait, share blocks, and one is
    preempted."""
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


def shots(data: bytes, folder: Path, browser: Browser) -> list[Image.Image]:
    """Pictures of steps around the first preemption."""
    read = Film(io.BytesIO(data))
    teller = Teller(read)
    preempted = next(
        index for index in range(len(read.frames)) if any("is preempted" in told for told in teller.decided(index))
    )
    first = max(0, preempted - FRAMES + 6)
    found = []
    path = folder / "steps.html"
    path.write_text(page_of(data, "Ten requests, a pool for four"), encoding="utf-8")
    page = browser.new_page(viewport=SIZE)
    page.goto(f"{path.as_uri()}#step={read.frames[first].step_id}")
    page.locator("[data-part=running] li").first.wait_for()
    for _ in range(FRAMES):
        page.wait_for_timeout(60)
        shot = Image.open(io.BytesIO(page.screenshot()))
        size = WIDTH, WIDTH * shot.height // shot.width
        found.append(shot.convert("RGB").resize(size, Image.Resampling.LANCZOS))
        page.click("[data-part=step]")
    page.close()
    return found


def stills(folder: Path, browser: Browser) -> dict[str, bytes]:
    """The pictures of the guides to films and to the sandbox by name, drawn from the runs described there."""
    names = ("run", "static", "continuous")
    options = {
        "run": (
            "--device",
            "rtx-4090",
            "--requests",
            "300",
            "--output-tokens",
            "lognormal:300,0.8",
            "--num-blocks",
            "1200",
        ),
        "static": (*COMPARED, "--batching", "static"),
        "continuous": COMPARED,
    }
    for name in names:
        command = [sys.executable, "-m", "pointsman", "simulate", *options[name], "--film", f"{name}.film"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    films = {name: folder.joinpath(f"{name}.film").read_bytes() for name in names}
    found = {}

    def draw(name: str, html: str, fragment: str, height: int, choose: str) -> None:
        path = folder / f"{name}.html"
        path.write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": 1400, "height": height})
        page.goto(path.as_uri() + fragment)
        page.locator("[data-part=running] li").first.wait_for()
        page.locator(choose).first.click()
        page.wait_for_timeout(500)
        found[name] = page.screenshot()
        page.close()

    draw("page", page_of(films["run"], "run.film"), "#step=10493&request=request-271", 1500, "[data-part=most] summary")
    both = page_of(films["static"], "static.film", (films["continuous"], "continuous.film"))
    draw("compare", both, "#step=120", 900, "h1")
    server = sandbox_server(Sandbox())
    threading.Thread(target=server.serve, daemon=True).start()
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.goto(server.url)
    page.select_option("#situation", "preemption")
    for button, count in (("#do-situation", "0 steps"), ("#do-run", "6 finished"), ("#do-what-if", "6 finished")):
        page.click(button)
        page.locator("#status", has_text=count).wait_for()
    page.locator("#comparing").wait_for()
    page.wait_for_timeout(500)
    found["sandbox"] = page.screenshot()
    page.close()
    server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    with sync_playwright() as tool, tempfile.TemporaryDirectory() as name:
        browser = tool.chromium.launch(executable_path=parser.parse_args().chromium, args=["--no-sandbox"])
        folder = Path(name)
        for name, data in stills(folder, browser).items():
            picture = Image.open(io.BytesIO(data)).convert("RGB")
            size = 1050, 1050 * picture.height // picture.width
            out = OUT / f"{name}.png"
            picture.resize(size, Image.Resampling.LANCZOS).quantize(
                256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
            ).save(out, optimize=True)
            print(out, f"{out.stat().st_size:,} bytes")
        pictures = shots(film(), folder, browser)
        browser.close()
    times = [MILLISECONDS] * (len(pictures) - 1) + [LAST]
    out = OUT / "steps.webp"
    pictures[0].save(
        out, save_all=True, append_images=pictures[1:], duration=times, loop=0, lossless=True, quality=100, method=6
    )
    print(out, f"{out.stat().st_size:,} bytes, {len(pictures)} frames")


if __name__ == "__main__":
    main()
