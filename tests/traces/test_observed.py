"""Recordings of a server's requests: malformed lines are errors that name the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.traces import TraceError, read_observed
from tests.sim.observed_logs import observed_lines, write_observed


def test_a_prompt_with_a_negative_number_of_new_blocks_is_refused(tmp_path: Path) -> None:
    lines = observed_lines(4)
    line = next(line["request"] for line in lines if line.get("call") == "add")
    line["blocks"][2] = -1
    with pytest.raises(TraceError, match=r"line 2: the prompt has -1 new blocks"):
        read_observed(write_observed(tmp_path / "recording.jsonl", lines))
