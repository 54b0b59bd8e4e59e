"""vLLM's second model runner reads our outputs correctly, by its own code up to the forward pass."""

from __future__ import annotations

import ast
import re

from tests.forms import seeds
from tests.integrations.vllm_process import NEEDS_VLLM, ROOT, compared, run_in_vllm

pytestmark = NEEDS_VLLM
WORKLOADS = seeds(3, 100)
OF_SOME_VERSIONS = {"block_table_updates", "encoder_input_updates", "num_spec_tokens_to_schedule", "skip_drafts"}
"""Fields that only some supported versions read."""


def test_second_model_runner_reads_our_outputs_as_it_reads_vllms() -> None:
    """Slots, tokens, blocks, positions, prefills and uniform decodes, step by step; each row reads its own KV."""
    tally = compared("vllm_v2_runner.py", WORKLOADS)
    count = len(WORKLOADS)
    assert tally["steps"] >= 50 * count and tally["hits"] >= count
    if count > 50:
        assert min(tally[what] for what in ("preempted", "resumed", "uniform decodes", "aborts")) > count // 3, tally
        assert tally.get("gave up drafts", 0) + tally.get("resumed in chunks", 0) <= count // 10, tally


def test_the_docstring_lists_the_fields_that_the_second_runner_reads() -> None:
    read = run_in_vllm("vllm_v2_runner.py", "fields")
    source = ROOT / "pointsman" / "integrations" / "vllm" / "scheduler_output.py"
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    listed: dict[str, list[str]] = {}
    for kind, names in re.findall(r"^    (\w+): ((?:\w+, )*\w+)$", docstring, re.MULTILINE):
        listed.setdefault(kind, []).extend(names.split(", "))
    assert listed.keys() == read.keys()
    for kind, names in read.items():
        assert set(names) <= set(listed[kind]), kind
        assert set(listed[kind]) - set(names) <= OF_SOME_VERSIONS, kind
