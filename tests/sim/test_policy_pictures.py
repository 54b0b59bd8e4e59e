"""The pictures of docs/reference/policies.md: each can be drawn, is shown, and matches its simulation."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from _common import AZURE_TRACE

from pointsman.sim.devices import device
from pointsman.sim.scenarios.picture import write_svg
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from tests.forms import is_long
from tests.sim.test_scenarios import First

ROOT = Path(__file__).parents[2]
STEP_TIME = RooflineStepTime(shape=model_shape("Llama-3.1-8B"), device=device("h100"))


def script() -> ModuleType:
    """`scripts/draw_policies.py` as a module."""
    spec = importlib.util.spec_from_file_location("draw_policies", ROOT / "scripts" / "draw_policies.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAWINGS = script().DRAWINGS
FROM_TRACES = ("least-cost", "eviction")


@pytest.mark.parametrize("name", DRAWINGS)
def test_each_policy_picture_is_documented_and_can_be_drawn(name: str, tmp_path: Path) -> None:
    """The long form draws the whole picture and compares it with the documentation's file; the short form uses few
    requests."""
    shown = ROOT / "docs" / "policies" / f"{name}.svg"
    assert f"](../policies/{name}.svg)" in (ROOT / "docs" / "reference" / "policies.md").read_text()
    assert shown.stat().st_size < 60_000
    drawing = DRAWINGS[name]
    if name in FROM_TRACES and not AZURE_TRACE.exists():
        pytest.skip(f"no trace at {AZURE_TRACE}")
    if not is_long():
        few = [
            replace(variant, workload=lambda seed, variant=variant: First(variant.workload(seed), 60))
            for variant in drawing.variants
        ]
        drawing = replace(drawing, variants=tuple(few))
    write_svg(drawing.run(STEP_TIME), tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    ElementTree.fromstring(drawn)
    assert all(f">{variant.name}</text>" in drawn for variant in drawing.variants)
    if is_long():
        assert drawn == shown.read_text(), "run scripts/draw_policies.py"


def test_an_unknown_picture_name_is_refused() -> None:
    with pytest.raises(SystemExit, match="no picture is called 'victims'; choose from growth"):
        script().main(["victims"])
