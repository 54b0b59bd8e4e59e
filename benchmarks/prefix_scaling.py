"""Cost of a long prefix hit as the pool grows.

A request whose prompt begins with 400 cached blocks is admitted in pools of 1,000, 10,000 and 100,000 blocks, the rest
of each pool full of other cached blocks. Timed is `add` and the `schedule` that looks the prompt up and admits the
request; and separately the `update` that ends it and frees its blocks. The pools alternate.

A scheduler that searches its free list block by block traverses the whole pool for each of the 400 blocks: a published
study of nano-vLLM measured 8, 71 and 759 ms at these sizes.

    python benchmarks/prefix_scaling.py --check
"""

from __future__ import annotations

import gc
from statistics import median
from time import process_time

import numpy as np
from _common import Targets, argument_parser, finish, print_table, run

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult

POOLS = (1_000, 10_000, 100_000)
NANO_VLLM_MS = {1_000: 8.0, 10_000: 71.0, 100_000: 759.0}
HIT_BLOCKS = 400
BLOCK_SIZE = 16
FILLER_BLOCKS = 200  # of each request that fills the pool
VOCABULARY = 32_000
MAX_GROWTH = 1.3


class FullPool:
    """A scheduler whose pool is full of cached blocks, among them those of one long prompt."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._rng = np.random.default_rng(num_blocks)
        self._num_requests = 0
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_model_len=16_384,
                max_num_seqs=256,
                max_num_batched_tokens=8_192,
            )
        )
        # The last token is beyond the last full block, so that all 400 can be found again.
        self.prompt = self._random_tokens(HIT_BLOCKS * BLOCK_SIZE + 1)
        self._fill()
        self.serve_prompt()

    def admit_again(self) -> tuple[float, float]:
        """Serve the long prompt once more; returns CPU ms of (`add` + `schedule`, `update`).

        Raises:
            RuntimeError: the prompt was not found in the cache.
        """
        admit, update, found = self.serve_prompt()
        if found != HIT_BLOCKS * BLOCK_SIZE:
            raise RuntimeError(f"{found} tokens were found in the prefix cache, not {HIT_BLOCKS * BLOCK_SIZE}")
        return admit * 1e3, update * 1e3

    def serve_prompt(self) -> tuple[float, float, int]:
        """Serve the long prompt, one output token; returns CPU seconds as above and the tokens found in the cache."""
        request = self._request(self.prompt)
        start = process_time()
        self.scheduler.add(request, 0.0)
        output = self.scheduler.schedule(0.0)
        admitted = process_time()
        self.scheduler.update(output, StepResult(np.array([1])), 0.0)
        updated = process_time()
        return admitted - start, updated - admitted, int(output.num_cached_tokens[0])

    def _fill(self) -> None:
        """Serve distinct prompts until every block of the pool has been used, and more."""
        blocks = 0
        while blocks < self.num_blocks:
            self.scheduler.add(self._request(self._random_tokens(FILLER_BLOCKS * BLOCK_SIZE)), 0.0)
            blocks += FILLER_BLOCKS
        while self.scheduler.has_unfinished_requests():
            output = self.scheduler.schedule(0.0)
            self.scheduler.update(output, StepResult(np.ones(int(output.samples.sum()), dtype=np.int64)), 0.0)

    def _request(self, prompt: np.ndarray) -> Request:
        self._num_requests += 1
        return Request(f"r{self._num_requests}", prompt, arrival_time=float(self._num_requests), max_tokens=1)

    def _random_tokens(self, count: int) -> np.ndarray:
        return self._rng.integers(3, VOCABULARY, size=count).astype(np.int32)


def main() -> int:
    arguments = argument_parser(__doc__ or "").parse_args()
    rounds = 51 if arguments.quick else 301

    pools = [FullPool(num_blocks) for num_blocks in POOLS]
    gc.collect()
    gc.freeze()  # as an engine does once it is up: old objects are not walked again and again
    admit: dict[int, list[float]] = {pool.num_blocks: [] for pool in pools}
    update: dict[int, list[float]] = {pool.num_blocks: [] for pool in pools}
    for _ in range(rounds):
        for pool in pools:
            admit_ms, update_ms = pool.admit_again()
            admit[pool.num_blocks].append(admit_ms)
            update[pool.num_blocks].append(update_ms)

    admit_medians = {size: median(times) for size, times in admit.items()}
    rows = [[f"{size:,}", admit_medians[size], median(update[size]), NANO_VLLM_MS[size]] for size in POOLS]
    header = ["blocks in the pool", "look-up + admission", "update that frees", "nano-vLLM (published study)"]
    print_table(f"a {HIT_BLOCKS}-block prefix hit, CPU ms, median of {rounds}", header, rows)
    growth = max(admit_medians.values()) / min(admit_medians.values())
    targets = Targets()
    targets.at_most("slowest pool / fastest pool", growth, MAX_GROWTH)
    figures = {
        "quick": arguments.quick,
        "admit_ms": {str(size): round(value, 4) for size, value in admit_medians.items()},
        "update_ms": {str(size): round(median(times), 4) for size, times in update.items()},
        "growth": round(growth, 3),
        "nano_vllm_ms": {str(size): value for size, value in NANO_VLLM_MS.items()},
    }
    return finish("prefix_scaling", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
