"""The page of a frontier: its readings follow the targets, and are those of the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.sim.crossing import Interval
from pointsman.sim.frontier import PERCENTILES, Curve, Point, highest_rate
from pointsman.sim.report.summary import ITL_OF, Targets
from pointsman.web.frontier import frontier_page

RATES = (1.0, 2.0, 4.0, 8.0)
COST = {
    "price_per_million_prompt_tokens": 0.1,
    "price_per_million_output_tokens": 0.5,
    "watts": 500.0,
    "joules_per_million_tokens": 3.6e6,
}


def around(value: float) -> Interval:
    return Interval(value, value / 1.25, value * 1.25)


def curve(speed: float) -> Curve:
    """TTFT doubles with the rate, the ITL rises by half; the last point is overloaded."""
    points = [
        Point(
            rate=rate * speed,
            ttft=dict.fromkeys(PERCENTILES, around(0.1 * rate)),
            itl={kind: dict.fromkeys(PERCENTILES, around(0.02 * 1.5**place)) for kind in ITL_OF},
            num_requests=100,
            num_refused=0,
            prompt_tokens_per_second=1000 * rate,
            output_tokens_per_second=100 * rate,
            busy=0.5,
            num_running=rate,
            is_overloaded=rate == RATES[-1],
        )
        for place, rate in enumerate(RATES)
    ]
    return Curve(points, saturation=Interval(6.0 * speed, 5.0 * speed, 7.0 * speed), is_complete=True)


CURVES = {"slow": curve(1.0), "<b>fast</b>": curve(3.0)}


def values(**others: Any) -> dict[str, Any]:
    """As `pointsman frontier --json` prints them."""
    ends = {name: [getattr(each.saturation, end) for end in ("value", "low", "high")] for name, each in CURVES.items()}
    return {
        "workload": "a test",
        "confidence": 0.9,
        "targets": {"ttft": 0.2, "itl": None, "itl_of": "pooled"},
        "percentile": "p99",
        "notes": ["Step times are invented."],
        "curves": [
            {
                "name": name,
                "saturation": ends[name],
                "points": [
                    {
                        "rate": point.rate,
                        "ttft": as_lists(point.ttft),
                        "itl": {kind: as_lists(each) for kind, each in point.itl.items()},
                        "output_tokens_per_second": point.output_tokens_per_second,
                        "busy": point.busy,
                        "is_overloaded": point.is_overloaded,
                        "cost": COST,
                    }
                    for point in each.points
                ],
            }
            for name, each in CURVES.items()
        ],
        **others,
    }


def as_lists(percentiles: Any) -> dict[str, list[float]]:
    return {name: [each.value, each.low, each.high] for name, each in percentiles.items()}


@pytest.fixture
def visit(open_page: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    path = tmp_path / "frontier.html"
    path.write_text(frontier_page(values()), encoding="utf-8")
    return lambda where="", **options: open_page(path.as_uri() + where, **options)


def answers(page: Any) -> list[str]:
    """The readings of the curves, as "rate low to high"."""
    return [" ".join(text.split()) for text in page.locator("#readings .answer").all_inner_texts()]


def readings(page: Any) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads(
        page.evaluate("JSON.stringify(curves.map(reading), (key, value) => value === Infinity ? 'inf' : value)")
    )
    return [{key: each if key == "limit" else float(each) for key, each in one.items()} for one in found]


def test_the_page_shows_the_highest_rate_of_each_curve(visit: Callable[..., Any]) -> None:
    page = visit()
    assert page.locator("h1").inner_text() == "Frontier: a test"
    assert page.locator("#readings th[scope=row]").all_inner_texts() == list(CURVES)
    assert answers(page) == ["2.0 1.6 to 2.5", "6 5 to 8"]
    row = page.locator("#readings tr").nth(1).locator("td").all_inner_texts()
    assert row[1:] == ["TTFT", "200", "0.1", "0.5", "500 W", "1"]
    assert "Step times are invented." in page.locator("#notes").inner_text()
    page.locator("summary").click()
    assert page.locator("#points tr").count() == 1 + 2 * len(RATES)


@pytest.mark.parametrize(
    ("where", "targets"),
    [
        ("#ttft=200&itl=none", Targets(ttft=0.2)),
        ("#ttft=none&itl=25&itl-of=gap", Targets(itl=0.025, itl_of="gap")),
        ("#ttft=330&itl=33&within=p50", Targets(ttft=0.33, itl=0.033)),
        ("#ttft=50&itl=none", Targets(ttft=0.05)),
        ("#ttft=9000&itl=none", Targets(ttft=9.0)),
        ("#ttft=none&itl=none", Targets()),
    ],
)
def test_readings_of_the_page_are_those_of_the_command(where: str, targets: Targets, visit: Callable[..., Any]) -> None:
    found = readings(visit(where))
    for one, each in zip(found, CURVES.values(), strict=True):
        expected = highest_rate(each, "p99", targets)
        rate = expected.rate
        assert one["limit"] == (expected.limit or None)
        assert [one[end] for end in ("value", "low", "high")] == pytest.approx([rate.value, rate.low, rate.high])


def test_the_arrow_keys_move_a_target_and_its_reading(visit: Callable[..., Any]) -> None:
    page = visit()
    before = readings(page)
    page.locator("#ttft").focus()
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
    after = readings(page)
    assert all(0 < new["value"] < old["value"] for new, old in zip(after, before, strict=True))
    assert float(page.locator("#ttft-ms").input_value()) < 200
    assert page.locator("#ttft").get_attribute("aria-valuetext").endswith(" ms")
    assert answers(page)[0].split()[0] in page.locator("#spoken").inner_text()
    page.keyboard.press("End")
    assert page.locator("#ttft-ms").input_value() == ""
    assert [one["limit"] for one in readings(page)] == ["queue", "queue"]


def test_a_typed_target_changes_the_reading_and_the_address(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#itl-ms").fill("25")
    assert [one["limit"] for one in readings(page)] == ["itl", "itl"]
    page.wait_for_url("**#ttft=200&itl=25&within=p99&itl-of=pooled")
    page.locator("#itl-ms").fill("-3")
    page.wait_for_url("**itl=none**")
    page.locator("#kind").select_option("request")
    assert "TPOT" in page.locator("#itl-title").inner_text()
    page.wait_for_url("**itl-of=request")


def test_a_target_line_is_dragged_in_the_chart(visit: Callable[..., Any]) -> None:
    page = visit(viewport={"width": 1280, "height": 900})
    line = page.locator("#ttft-chart .goal").bounding_box()
    page.mouse.move(line["x"] + 200, line["y"])
    page.mouse.down()
    page.mouse.move(line["x"] + 200, line["y"] + 40, steps=4)
    page.mouse.up()
    lower = float(page.locator("#ttft-ms").input_value())
    assert lower < 200
    page.mouse.move(line["x"] + 200, line["y"] - 40)
    assert float(page.locator("#ttft-ms").input_value()) == lower, "the line is released"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_marks_each_reading(scheme: str, visit: Callable[..., Any]) -> None:
    page = visit(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for chart in ("#ttft-chart", "#itl-chart"):
        assert page.locator(f"{chart} .mark").count() == len(CURVES)
        assert page.locator(f"{chart} .curve.beyond").count() == len(CURVES)
        assert page.locator(f"{chart} svg").bounding_box()["width"] <= 390
