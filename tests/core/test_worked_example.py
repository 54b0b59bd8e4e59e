"""The worked example of a published description of vLLM's scheduler, with numbers that add up.

Budget 2,048 tokens, 4 sequences, blocks of 16. Running: A decodes (prompt 100, 50 outputs, 149 tokens computed), B has
its first output (prompt 200), C has 300 of 500 prompt tokens computed. Waiting: D (1,000 tokens, 256 of them cached),
E. A has two drafts, so it gets three tokens.
"""

from __future__ import annotations

import numpy as np

from pointsman.core import Reason, Request
from pointsman.core.policy.gate import Int64Array, Limit
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import View
from pointsman.core.state.reason import Deferral

from .helpers import Host, cached_of, names, tokens_of


class FirstChunk(Limit):
    """Limits prompts to 300 tokens a step while it is on: the budget alone could not cut C there in one step."""

    is_on = True

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        np.minimum(want, 300 if self.is_on else 2048, out=want)

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        return min(want, 300 if self.is_on else 2048)


def example(num_blocks: int) -> Host:
    """The state before the step."""
    host = Host(
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        num_draft_tokens=2,
    )
    first_chunk = FirstChunk()
    gates = host.scheduler._parts.gates
    gates.limits.append(first_chunk)  # the running part reads the same list
    gates.after_lookup.insert(1, first_chunk)
    document = host.prompt(256)
    host.add("earlier", [*document, 1], max_tokens=1)
    host.run_to_end()
    a = host.add("A", 100, max_tokens=200)
    for _ in range(49):
        host.step()
    b, c = host.add("B", 200, max_tokens=200), host.add("C", 500, max_tokens=200)
    output = host.step()
    assert tokens_of(output) == {"A": 1, "B": 200, "C": 300}
    host.propose(output, {"A": [1, 2]})
    first_chunk.is_on = False
    assert (a.num_tokens, a.num_computed_tokens) == (150, 149)
    assert (b.num_tokens, b.num_computed_tokens) == (201, 200)
    assert (c.num_tokens, c.num_computed_tokens) == (500, 300)
    host.add("D", [*document, *host.prompt(744)], max_tokens=200)
    host.add("E", 500, max_tokens=200)
    return host


def test_a_step_decides_as_in_the_worked_example_of_the_docs() -> None:
    host = example(num_blocks=128)
    output = host.step()
    assert tokens_of(output) == {"A": 3, "B": 1, "C": 200, "D": 744}
    assert cached_of(output) == {"D": 256}
    assert output.total_num_scheduled_tokens == 948
    waiting = host.explain("E")
    assert (waiting.reason, waiting.missing) == (Reason.SEQUENCE_LIMIT, 1)


def test_with_100_blocks_d_waits_and_preempts_no_request() -> None:
    host = example(num_blocks=100)
    output = host.step()
    assert tokens_of(output) == {"A": 3, "B": 1, "C": 200}
    assert names(output.preempted) == []
    waiting = host.explain("D")
    # A, B and C hold 10 + 13 + 32 of 100 blocks, and D needs 63, as its cached blocks are free blocks too.
    assert (waiting.reason, waiting.missing, waiting.blocker) == (Reason.BLOCKS, 63 - 45, "C")
