"""The tables of reasons in docs/reference/metrics.md have exactly the reasons that the scheduler can give."""

from __future__ import annotations

import re
from pathlib import Path

from pointsman.core import Reason, Scheduler, SchedulerConfig
from pointsman.core.observe.explain import CAUSES
from pointsman.core.state.status import ParkReason

DOCS = Path(__file__).resolve().parents[3] / "docs"
NOT_TRIED = {"not_tried"}
"""A label of `pointsman:requests_waiting`, for a head that no step has checked."""


def tables(name: str) -> list[dict[str, list[str]]]:
    """The tables in a document whose first column is a reason, each as its other cells by reason."""
    found: list[dict[str, list[str]]] = []
    columns = 0
    for line in (DOCS / name).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells[:1] == ["reason"] and cells[1].startswith("what ") and "waits for" in cells[1]:
            found.append({})
            columns = len(cells)
        elif not cells:
            columns = 0
        elif columns and set(line) - set("|- "):
            assert len(cells) == columns, line
            for reason in re.findall(r"`(\w+)`", cells[0]):
                assert reason not in found[-1], f"{name} has two lines for {reason}"
                found[-1][reason] = cells[1:]
    return found


def test_every_reason_has_a_line_with_a_remedy() -> None:
    found = tables("reference/metrics.md")
    assert [set(table) for table in found] == [
        {reason.value for reason in Reason} | NOT_TRIED,
        {park.value for park in ParkReason},
    ]
    assert [reason for table in found for reason, cells in table.items() if not all(cells)] == []


def test_a_reason_has_a_remedy_in_code_where_the_document_has_one() -> None:
    (reasons, _) = tables("reference/metrics.md")
    without = {reason for reason, cells in reasons.items() if cells[-1] == "nothing"}
    assert {reason.value for reason, cause in CAUSES.items() if not cause.remedy} == without | {"behind", "parked"}


def test_the_reasons_are_the_labels_of_the_metrics() -> None:
    stats = Scheduler(SchedulerConfig(num_blocks=4, max_model_len=32)).stats()
    (reasons, _) = tables("reference/metrics.md")
    assert set(stats.deferrals) | {"parked"} == set(reasons) - NOT_TRIED
