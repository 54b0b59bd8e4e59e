"""`pointsman frontier`: curves of settings and devices, their readings and costs, the files, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from draw_frontier import COMMAND, PICTURE, draw

from pointsman.cli.frontier import _two_digits
from pointsman.cli.simulation import device_names
from pointsman.sim.trial import Job, Judge
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused
from tests.forms import is_long

Run = Callable[..., Finished]
LENGTHS = ("--prompt-tokens", 300, "--output-tokens", 20)
SMALL = (*LENGTHS, "--requests", 60, "--samples", 2, "--rates", "2,30", "--workers", 1)


def curves(finished: Finished) -> list[dict[str, Any]]:
    assert finished.code == 0, finished.err
    found: list[dict[str, Any]] = json.loads(finished.out)["curves"]
    return found


def test_the_command_prints_a_row_for_each_rate_and_the_reading(pointsman: Run) -> None:
    finished = pointsman("frontier", *SMALL, "--ttft-target", "1s", "--price-per-hour", 3)
    printed = " ".join(finished.out.split())
    assert finished.code == 0, finished.err
    assert "calibrate with a log" in printed and "requests/s TTFT p50 TTFT p99 ITL p50 ITL p99 tokens/s" in printed
    rows = [line.split() for line in finished.out.splitlines() if line.strip().startswith(("2  ", "30  "))]
    assert [row[0] for row in rows] == ["2", "30"]
    assert "as given: " in printed and "with p99 of TTFT ≤ 1 s" in printed
    assert max(map(len, finished.out.splitlines())) <= 100


def test_devices_and_variants_have_curves_with_price_and_power(pointsman: Run) -> None:
    variant = ("--variant", "small steps=--max-num-batched-tokens 256 --max-num-seqs 64")
    prices = ("--device", "h100,l40s", "--price-per-hour", "3,1.2")
    found = curves(pointsman("frontier", *SMALL, *variant, *prices, "--json"))
    names = [curve["name"] for curve in found]
    assert names == ["H100-SXM", "H100-SXM, small steps", "L40S", "L40S, small steps"]
    assert [curve["price_per_hour"] for curve in found] == [3, 3, 1.2, 1.2]
    assert [curve["config"]["max_num_batched_tokens"] for curve in found] == [8192, 256, 8192, 256]
    for curve in found:
        assert [point["rate"] for point in curve["points"]] == [2, 30]
        for point in curve["points"]:
            cost, board = point["cost"], 700 if "H100" in curve["name"] else 350
            assert 0.2 * board < cost["watts"] <= board
            tokens = point["prompt_tokens_per_second"] + point["output_tokens_per_second"]
            price = cost["price_per_million_tokens"] * tokens * 3600 / 1e6
            assert price == pytest.approx(curve["price_per_hour"])
            assert cost["price_per_million_output_tokens"] > cost["price_per_million_prompt_tokens"] > 0
    light = [curve["points"][0]["ttft"]["p50"][0] for curve in found]
    assert light[0] < light[2], "an L40S computes a prompt more slowly"


def test_replicas_multiply_price_and_power(pointsman: Run) -> None:
    variant = ("--variant", "three=--replicas 3 --price-per-hour 2")
    one, three = curves(pointsman("frontier", *SMALL, *variant, "--price-per-hour", 1, "--json"))
    assert (one["num_replicas"], one["price_per_hour"]) == (1, 1)
    assert (three["num_replicas"], three["price_per_hour"]) == (3, 6)
    assert three["points"][1]["cost"]["watts"] > one["points"][1]["cost"]["watts"]
    assert three["points"][1]["ttft"]["p99"][0] < one["points"][1]["ttft"]["p99"][0]


def test_a_smaller_budget_lowers_the_longest_gaps(pointsman: Run) -> None:
    load = ("--prompt-tokens", 3000, "--output-tokens", 40, "--rates", 10, *SMALL[4:8], "--workers", 1)
    large, small = curves(pointsman("frontier", *load, "--variant", "--max-num-batched-tokens 512", "--json"))
    assert small["name"] == "--max-num-batched-tokens 512"
    gaps = [curve["points"][0]["itl"]["gap"]["p99"][0] for curve in (large, small)]
    assert gaps[1] < 0.6 * gaps[0]


def test_the_files_show_what_the_command_prints(pointsman: Run, tmp_path: Path) -> None:
    svg, html = tmp_path / "frontier.svg", tmp_path / "frontier.html"
    files = ("--svg", svg, "--html", html)
    found = curves(pointsman("frontier", *SMALL, *files, "--json"))
    assert ElementTree.fromstring(svg.read_text()).get("role") == "img"
    page = html.read_text()
    assert "frontier-data" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert len(found) == 1 and found[0]["reading"]["limit"] in ("ttft", None, "queue")


def test_a_trace_is_replayed_at_each_rate(pointsman: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2024-05-10 00:00:{place // 2:02d}.{place % 2 * 5},200,10" for place in range(100)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    finished = pointsman("frontier", "--trace", trace, "--rates", "2,20", "--workers", 1, "--json")
    (curve,) = curves(finished)
    assert curve["num_requests"] == 100 and len(curve["points"]) == 2
    assert curve["points"][0]["ttft"]["p50"][0] < curve["points"][1]["ttft"]["p50"][0]


def test_ctrl_c_prints_the_points_so_far(pointsman: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure = Judge.measure

    def interrupted(self: Judge, job: Job, progress: Any = None) -> Any:
        if job.load == 30:
            raise KeyboardInterrupt
        return measure(self, job, progress)

    monkeypatch.setattr(Judge, "measure", interrupted)
    html = tmp_path / "frontier.html"
    finished = pointsman("frontier", *SMALL, "--variant", "--max-num-seqs 8", "--html", html, "--json")
    found = json.loads(finished.out)
    assert finished.code == 130 and not found["is_complete"] and html.exists()
    assert [len(curve["points"]) for curve in found["curves"]] == [1]
    assert any("interrupted" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--percentile", "p98"), "--percentile is 'p98'; give one of p50, p90, p95, p99"),
        (("--rates", "1,two"), "--rates is '1,two'; give 1 to 40 numbers of requests a second above 0, like 1,2,4,8"),
        (("--rates", "0"), "--rates is '0'; give 1 to 40 numbers of requests a second above 0, like 1,2,4,8"),
        (("--samples", 1), "--samples is 1; it must be at least 2"),
        (("--workers", 0), "--workers is 0; it must be at least 1"),
        (("--variant", "x=--trace y"), "--variant 'x=--trace y': No such option: --trace"),
        (("--variant", "x=--max-num-seqs many"), "--variant 'x=--max-num-seqs many': Invalid value"),
        (("--variant", "x=--order nothing"), "--variant x: "),
        (("--variant", "small"), "--variant is 'small'; give a name and the options that differ"),
        (("--variant", "x='"), "No closing quotation"),
        (("--variant", "x=--max-num-seqs 8", "--variant", "x=--max-num-seqs 9"), "two curves are called 'x'"),
        (("--device", "h100,l40s", "--price-per-hour", "1,2,3"), "--price-per-hour has 3 prices for 2 devices"),
        (("--price-per-hour", "cheap"), "--price-per-hour is 'cheap'; give a number"),
        (("--price-per-hour", -1), "--price-per-hour is '-1'; give a number of 0 or more"),
        (("--replicas", 0), "--replicas is 0; it must be at least 1"),
        (("--think", 3), "--users and --think make the rate depend on the service"),
        (("--device", "h100,l40s,h200,a100,b200,t4,l4"), "7 devices with 1 settings each are 7 curves"),
        (("--html", "/nowhere/page.html"), "cannot write /nowhere/page.html"),
    ],
)
def test_wrong_options_are_refused_before_a_simulation(args: tuple[Any, ...], message: str, pointsman: Run) -> None:
    check_refused(pointsman("frontier", *args), message)


def test_a_description_of_a_device_is_one_device() -> None:
    assert device_names({"device": "h100, l40s"}) == ["h100", "l40s"]
    described = "memory=32GiB,bandwidth=1792GB/s,bf16=209.5TFLOPS"
    assert device_names({"device": described}) == [described]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0123, "0.012"), (0.4, "0.40"), (7.04, "7.0"), (12.6, "13"), (2163, "2,200")]
)
def test_latencies_have_two_digits(value: float, text: str) -> None:
    assert _two_digits(value) == text


def test_the_documented_picture_is_that_of_the_documented_command(tmp_path: Path) -> None:
    """The long form draws it again."""
    root = Path(__file__).parents[2]
    guide, shown = (root / "docs" / "guides" / "size_a_deployment.md").read_text(), PICTURE.read_text()
    assert f"\n{COMMAND}\n" in guide and "](../frontier/budgets.svg)" in guide
    assert "](docs/frontier/budgets.svg)" in (root / "README.md").read_text()
    assert len(shown) < 60_000
    texts = [each.text for each in ElementTree.fromstring(shown).iter()]
    assert "as given" in texts and "budget 1024" in texts and "target 50 ms" in texts
    others = () if is_long() else ("--rates", "2", "--requests", "20", "--samples", "2", "--workers", "1")
    with pytest.raises(SystemExit, match="0"):
        draw(tmp_path / "picture.svg", *others)
    drawn = (tmp_path / "picture.svg").read_text()
    assert drawn == shown if is_long() else ElementTree.fromstring(drawn).get("role") == "img"
