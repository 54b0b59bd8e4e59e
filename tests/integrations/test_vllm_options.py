"""Each option of the installed `vllm serve` has an answer in `pointsman serve`."""

from __future__ import annotations

import pytest

from pointsman.cli.vllm_options import EXPLAINED, MANY, RENAMED, SAME, find, is_flag
from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm

pytestmark = [*NEEDS_VLLM, pytest.mark.next_vllm]


def test_each_option_of_vllm_serve_is_in_a_table() -> None:
    options = run_in_vllm("vllm_options.py")
    assert len(options) > 300
    unknown = [name for names, _ in options for name in names if find(name.lstrip("-")) is None]
    assert not unknown, f"give these options a place in pointsman/cli/vllm_options.py: {unknown}"
    for names, num_values in options:
        name, _ = find(names[0].lstrip("-")) or ("", True)
        assert name in SAME or name in RENAMED or name in EXPLAINED
        if name not in SAME:
            assert is_flag(name) == (num_values == 0), names
        assert (num_values in ("+", "*")) <= (name in MANY), names
