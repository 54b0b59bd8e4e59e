"""Scenarios: the verdict on each claim, and that the documentation shows it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from pointsman.cli.scenario import print_figures
from pointsman.sim.devices import device
from pointsman.sim.errors import UnknownName
from pointsman.sim.scenarios import SCENARIOS, Check, Figure, Finding, Scenario, Variant, scenario
from pointsman.sim.scenarios.picture import picture, write_page, write_svg
from pointsman.sim.scenarios.scenario import Bars, mean_e2e, output_rate, settings
from pointsman.sim.scenarios.workloads import Stream, Streams, arriving
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import LinearStepTime, RooflineStepTime
from pointsman.sim.workload import Arrival, SimRequest, Workload
from tests.forms import short_of

DOCS = Path(__file__).parents[2] / "docs"
STEP_TIME = RooflineStepTime(shape=model_shape("Llama-3.1-8B"), device=device("h100"))
CONSTANT = LinearStepTime(per_step=0.01)

HOLDS = {
    "static-batching": [False, True, True, False, True],
    "chunk-size": [True, True, True, False, False, True],
    "watermark": [False, True, True, True, True],
    "full-sequence": [True, False, True, True, True, True, False, True],
    "prefix-reuse": [True, True, True, False, True],
    "preemption-recovery": [True, False, False, False],
    "priority-inversion": [True, True, True],
    "preemption-responses": [True, True, False, True, True, True, True, False],
    "recommended-settings": [True, False, False, True, False, False, False, True, False, False, False],
}
"""The verdict on each part of each claim."""
CHEAP = ("static-batching", "chunk-size", "watermark", "prefix-reuse", "preemption-recovery", "priority-inversion")


def printed(found: Finding) -> str:
    shown = io.StringIO()
    print_figures(found, Console(file=shown, highlight=False, width=100))
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines())


# ---------------------------------------------------------------------- the claims


@pytest.mark.parametrize("name", short_of(list(SCENARIOS), CHEAP))
def test_scenario_verdicts_match_those_in_the_documentation(name: str, tmp_path: Path) -> None:
    found = scenario(name).run(STEP_TIME)
    assert [check.holds for check in found.checks] == HOLDS[name], found.checks
    page = (DOCS / "how_it_works" / "claims.md").read_text()
    (shown,) = re.findall(rf"```console\n\$ pointsman simulate --scenario {name}\n(.*?)\n```\n", page, re.DOTALL)
    assert shown == printed(found), "run scripts/draw_scenarios.py"
    assert f"](../scenarios/{name}.svg)" in page
    write_svg(found, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text() == (DOCS / "scenarios" / f"{name}.svg").read_text()


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", range(1, 4))
def test_scenario_verdicts_do_not_depend_on_the_seed(name: str, seed: int) -> None:
    found = scenario(name).run(STEP_TIME, seeds=[seed])
    assert [check.holds for check in found.checks] == HOLDS[name], found.checks


@dataclass(frozen=True)
class First:
    """The first requests of a workload."""

    workload: Workload
    count: int

    @property
    def num_requests(self) -> int:
        return self.count

    def first_arrivals(self) -> Iterator[Arrival]:
        return islice(self.workload.first_arrivals(), self.count)

    def on_finished(self, request: SimRequest, now: float) -> Arrival | None:
        return None


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in CHEAP])
def test_long_scenarios_run_with_fewer_requests(name: str) -> None:
    whole = scenario(name)
    small = [
        replace(variant, workload=lambda seed, variant=variant: First(variant.workload(seed), 4))
        for variant in whole.variants
    ]
    found = replace(whole, variants=tuple(small)).run(STEP_TIME)
    assert len(found.checks) == len(HOLDS[name])
    for row in found.rows:
        assert row.outcome.timings.count == 4
    assert "nan" not in printed(found)


def test_scenario_verdicts_may_differ_on_another_device() -> None:
    """If every step takes the same time, a whole prompt in one step delays nothing."""
    (smoother, *_, near, _, _, _) = scenario("chunk-size").run(CONSTANT).checks
    assert smoother.holds
    assert not near.holds
    assert "whole prompt" in near.figures


def test_an_unknown_scenario_name_lists_the_nearest_names() -> None:
    assert scenario("Chunk-Size") is SCENARIOS["chunk-size"]
    with pytest.raises(UnknownName, match="no scenario is called 'watermarks'; nearest: watermark"):
        scenario("watermarks")
    assert all(name == each.name for name, each in SCENARIOS.items())


# ---------------------------------------------------------------------- running one


def never_more(found: Finding) -> list[Check]:
    few, many = found.column("tok/s")
    return [Check("more slots are no faster", many <= few, f"{found.text('tok/s', 'two <slots>')} & {few:.0f}")]


TINY = Scenario(
    name="tiny",
    claim="More slots are no faster.",
    source="a test",
    setting="A few requests.",
    variants=tuple(
        Variant(name, settings(100, max_num_seqs=slots), lambda seed: arriving(12, "poisson:50", "40", "20", seed))
        for name, slots in (("one slot", 1), ("two <slots>", 2))
    ),
    figures=(
        Figure("tok/s", "", output_rate),
        Figure("end-to-end", "s", mean_e2e),
        Figure("none", "s", lambda run: None),
    ),
    checks=never_more,
    panels=(Bars("tok/s"), Bars("none")),
)


def test_figures_of_a_scenario_are_means_over_the_seeds() -> None:
    single = [TINY.run(CONSTANT, seeds=[seed]).value("end-to-end", "one slot") for seed in (3, 4)]
    found = TINY.run(CONSTANT, seeds=[3, 4])
    estimate = found.rows[0].values[1]
    assert estimate.value == pytest.approx(sum(single) / 2)
    assert estimate.low is not None and estimate.high is not None
    assert estimate.low < min(single) < max(single) < estimate.high
    rate, end_to_end, _ = TINY.figures
    assert rate.text(replace(estimate, value=1234.0, low=1.5, high=2000.0)) == "1,234 (1.50-2,000)"
    assert end_to_end.text(replace(estimate, value=0.5, low=0.25, high=1.5)) == "500 ms (250-1,500)"
    assert TINY.run(CONSTANT).rows[0].values[1].low is None
    assert math.isnan(found.value("none", "one slot"))
    assert found.text("none", "one slot") == "-"
    (check,) = found.checks
    assert not check.holds
    with pytest.raises(ValueError, match="seeds is empty"):
        TINY.run(CONSTANT, seeds=[])


def test_an_interrupted_scenario_has_rows_but_no_verdict() -> None:
    calls: list[int] = []

    def interrupt(num_finished: int, now: float) -> None:
        calls.append(num_finished)
        if num_finished > 400:
            raise KeyboardInterrupt

    longer = replace(
        TINY,
        variants=tuple(
            replace(variant, workload=lambda seed: arriving(400, "poisson:50", "40", "20", seed))
            for variant in TINY.variants
        ),
    )
    found = longer.run(CONSTANT, progress=interrupt)
    assert not found.is_complete
    assert [row.variant.name for row in found.rows] == ["one slot"]
    assert found.checks == []
    assert calls == sorted(calls)


def test_a_scenario_refuses_two_variants_of_equal_name() -> None:
    with pytest.raises(ValueError, match="two variants"):
        replace(TINY, variants=TINY.variants[:1] * 2)


def test_the_picture_shows_every_variant_and_escapes_names(tmp_path: Path) -> None:
    found = TINY.run(CONSTANT)
    drawn = ElementTree.fromstring(picture(found))
    texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert texts.count("one slot") == texts.count("two <slots>") == 2
    widths = [float(element.attrib["width"]) for element in drawn.iter() if element.tag.endswith("rect")]
    few, many = found.column("tok/s")
    assert widths[0] / widths[1] == pytest.approx(few / many, abs=0.01)
    assert widths[2:] == [0, 0]
    write_page(found, tmp_path / "page.html", ("a <note>",))
    page = (tmp_path / "page.html").read_text()
    assert "does not hold" in page
    assert "a &lt;note&gt;" in page
    assert "<slots>" not in page


def test_requests_of_several_streams_are_merged_by_arrival_time() -> None:
    streams = Streams(
        (
            Stream("first", 3, "10", "lognormal:50,1", "constant:1"),
            Stream("second", 2, "20", "lognormal:50,1", "constant:1", start=0.5, priority=-1),
        ),
        seed=7,
    )
    arrivals = list(streams.first_arrivals())
    assert [time for time, _ in arrivals] == pytest.approx([0, 0.5, 1, 1.5, 2])
    requests = [request for _, request in arrivals]
    assert [request.tenant for request in requests] == ["first", "second", "first", "second", "first"]
    assert [request.priority for request in requests] == [0, -1, 0, -1, 0]
    assert [request.index for request in requests] == list(range(5))
    assert len({request.request_id for request in requests}) == 5
    assert arrivals == list(streams.first_arrivals())
    others = [request.num_output_tokens for _, request in replace(streams, seed=8).first_arrivals()]
    assert others != [request.num_output_tokens for request in requests]
    assert streams.num_requests == 5
