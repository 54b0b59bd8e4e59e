"""Reads outputs with the code of vLLM's second model runner: a script for the environment with vLLM.

    python vllm_v2_runner.py FIRST COUNT   prints one JSON line: counts of events, and differences from vLLM's own
    python vllm_v2_runner.py fields        prints the fields that its sources read

Random workloads as in `vllm_decisions.py`. The second runner needs a GPU to compute. Its preparation of
an output runs here: the slot of a request, its tokens, blocks and positions, the order of the batch, and whether a step
is a uniform decode. Only the kernel that copies staged writes is replaced by a loop.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _scheduler_worker import Settings
from _vllm_runner import runner_output
from _vllm_worker import build_config
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.worker import gpu
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.states import RequestState

from pointsman.integrations.vllm import Scheduler
from tests.integrations.vllm_decisions import HASH, Side, Workload, configured, make_workload, own_class, run_both


class Ignores:
    """Values about sampling, adapters and models are not kept here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def apply(tensor: Any) -> None:
    """Copy staged values of a tensor to their place, like vLLM's kernel."""
    begin = 0
    staged = tensor._staged_write_indices, tensor._staged_write_starts, tensor._staged_write_cu_lens
    for index, start, end in zip(*staged, strict=True):
        values = torch.tensor(tensor._staged_write_contents[begin:end], dtype=tensor.dtype)
        if tensor.gpu.dim() == 1:
            tensor.gpu[index] = values[0]
        else:
            tensor.gpu[index, start : start + len(values)] = values
        begin = end
    tensor.clear_staged_writes()


class V2Runner:
    """vLLM's second model runner up to the forward pass."""

    def __init__(self, workload: Workload, tokens_of: Any) -> None:
        scheduler, device = workload.scheduler, torch.device("cpu")
        length, seqs, budget = (
            scheduler["max_model_len"],
            scheduler["max_num_seqs"],
            scheduler["max_num_batched_tokens"],
        )
        states = RequestState(seqs, length, budget, workload.num_drafts, 1000, device)
        states.apply_staged_writes = self._apply_states
        tables = BlockTables([workload.block_size], seqs, budget, [-(-length // workload.block_size)], device)
        self._states, self._tables, self._tokens_of = states, tables, tokens_of
        self._held: dict[tuple[int, int], int] = {}
        self._block_size = workload.block_size
        self.met: Counter[str] = Counter()
        self.summary: dict[str, Any] = {}
        self._runner = SimpleNamespace(
            req_states=states,
            block_tables=tables,
            model_state=Ignores(),
            lora_state=Ignores(),
            decode_query_len=1 + workload.num_drafts,
            is_last_pp_rank=False,
            use_pp=False,
            **dict.fromkeys(
                ("pooling_runner", "pp_handler", "encoder_cache", "prompt_logprobs_worker", "adaptive_verification")
            ),
            **dict.fromkeys(("sampler", "kv_block_zeroer", "pcp_manager")),
        )
        self._runner._remove_request = partial(GPUModelRunner._remove_request, self._runner)

    def _apply_states(self) -> None:
        for tensor in (self._states.total_len, self._states.all_token_ids, self._states.num_computed_tokens):
            apply(tensor)

    def execute(self, output: Any, sample: Any) -> Any:
        runner, states = self._runner, self._states
        known = set(states.req_id_to_index)
        self.met["preempted"] += len(output.preempted_req_ids or ())
        self.met["resumed"] += sum(
            len(new.prefill_token_ids) > len(new.prompt_token_ids) for new in output.scheduled_new_reqs
        )
        for step in (
            GPUModelRunner.finish_requests,
            GPUModelRunner.free_states,
            GPUModelRunner.add_requests,
            GPUModelRunner.update_requests,
        ):
            step(runner, output)
        gone = output.finished_req_ids | (output.preempted_req_ids or set())
        new = {each.req_id for each in output.scheduled_new_reqs}
        assert not new & (known - gone), "a request that is new has a slot"
        assert set(states.req_id_to_index) == (known - gone) | new
        apply(self._tables.block_tables[0])
        self.summary = {}
        if not output.total_num_scheduled_tokens:
            return runner_output([], [])
        batch, uniform = GPUModelRunner.gather_batch_req_state(runner, output, False)
        assert sorted(batch.req_ids) == sorted(output.num_scheduled_tokens) and batch.num_tokens == sum(
            batch.num_scheduled_tokens
        )
        self.met["uniform decodes"] += uniform is not None and uniform > 1
        rows = [self._row(name, output) for name in batch.req_ids]
        for name, _, start, end in rows:
            self._write(name, start, end, output)
        for name, _, start, end in rows:
            self._read(name, start, end, output)
        sampled = []
        for name, samples, _, end in rows:
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            run = [sample(name, end - len(drafts))] if samples else []
            for place, draft in enumerate(drafts, start=end - len(drafts) + 1):
                if run[-1] != draft:
                    break
                run.append(sample(name, place))
            sampled.append(run)
        self.summary = {"uniform": uniform, "prefill": batch.has_prefill, "rows": dict(sorted(self._seen(batch)))}
        return runner_output(batch.req_ids, sampled)

    def _seen(self, batch: Any) -> list[tuple[str, list[int]]]:
        states = self._states
        found = []
        for place, name in enumerate(batch.req_ids):
            slot = states.req_id_to_index[name]
            assert batch.idx_mapping_np[place] == slot
            values = (
                states.num_computed_tokens_np[slot],
                states.prefill_len.np[slot],
                states.prompt_len.np[slot],
                states.max_seq_len[slot],
                batch.is_prefilling_np[place],
            )
            found.append((name, [int(value) for value in values]))
        return found

    def _row(self, name: str, output: Any) -> tuple[str, bool, int, int]:
        """A row's name, whether it samples, its first position, and the position after its last."""
        states = self._states
        slot = states.req_id_to_index[name]
        start = int(states.num_computed_tokens_np[slot])
        end = start + output.num_scheduled_tokens[name]
        prefill = int(states.prefill_len.np[slot])
        told = states.all_token_ids.gpu[slot, start : min(end, prefill)].tolist()
        assert told == self._tokens_of(name, prefill)[start:end], f"{name} computes other tokens than its own"
        num_blocks = int(self._tables.num_blocks.np[0, slot])
        assert num_blocks * self._block_size >= end, f"{name} has {num_blocks} blocks for {end} tokens"
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        return name, end - len(drafts) >= prefill, start, end

    def _slot_of(self, name: str, position: int) -> tuple[int, int]:
        slot = self._states.req_id_to_index[name]
        block = int(self._tables.block_tables[0].gpu[slot, position // self._block_size])
        assert block != 0, "a token is in the null block"
        return block, position % self._block_size

    def _write(self, name: str, start: int, end: int, output: Any) -> None:
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        tokens = self._tokens_of(name, end - len(drafts)) + drafts
        for position in range(start, end):
            self._held[self._slot_of(name, position)] = hash(tuple(tokens[: position + 1]))

    def _read(self, name: str, start: int, end: int, output: Any) -> None:
        known = end - len(output.scheduled_spec_decode_tokens.get(name, []))
        tokens = self._tokens_of(name, known)
        for position in range(known):
            found = self._held.get(self._slot_of(name, position))
            assert found == hash(tuple(tokens[: position + 1])), f"{name} reads another KV at {position}"


class V2Side(Side):
    """One of the schedulers, with the second runner."""

    def __init__(self, workload: Workload, config: Any, scheduler_class: type) -> None:
        super().__init__(workload, config, scheduler_class)
        self.runner = V2Runner(workload, self._tokens)

    def _tokens(self, name: str, count: int) -> list[int]:
        prompt = self.added[name].prompt_token_ids[:count]
        return prompt + [self._sample(name, position) for position in range(len(prompt), count)]

    def schedule(self, throttle_prefills: bool = False) -> dict[str, Any]:
        decision = super().schedule(throttle_prefills)
        decision["new"] = sorted(decision["new"])
        assert not decision["resumed"], "the second runner knows no resumed request"
        return decision | {"second runner": self.runner.summary}


def fields_read() -> dict[str, list[str]]:
    """The attributes that the sources of the second runner read of outputs, by the class that has them."""
    folder = Path(gpu.__file__).parent
    text = "\n".join(path.read_text() for path in folder.rglob("*.py") if path.name != "warmup.py")
    cached = r"\breqs\.(req_ids|num_computed_tokens|new_block_ids|\w*resumed\w*|num_output\w*|all_token_ids)"
    patterns = {
        "SchedulerOutput": r"\bscheduler_output\.(\w+)",
        "NewRequestData": r"\bnew_req_data\.(\w+)",
        "CachedRequestData": cached,
    }
    return {name: sorted(set(re.findall(pattern, text))) for name, pattern in patterns.items()}


def main() -> None:
    if sys.argv[1] == "fields":
        print(json.dumps(fields_read()))
        return
    first, count = int(sys.argv[1]), int(sys.argv[2])
    init_none_hash(HASH)
    base = build_config(Settings(num_blocks=100, max_model_len=1 << 12, max_num_seqs=8, max_num_batched_tokens=1 << 12))
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # vLLM refuses it without Triton, when it makes `base`
    tally: Counter[str] = Counter()
    differences = []
    for seed in range(first, first + count):
        workload = make_workload(seed)
        config = configured(base, workload)
        assert config.use_v2_model_runner
        config.additional_config = {"pointsman": {"preset": "vllm"}}
        sides = V2Side(workload, config, own_class(workload)), V2Side(workload, config, Scheduler)
        try:
            found = run_both(sides, workload, tally)
        except Exception as error:
            found = {"what": [f"{type(error).__name__}: {error}"]}
            if count == 1:
                raise
        finally:
            for side in sides:
                side.close()
        tally.update(sides[1].runner.met)
        if found is not None:
            differences.append({"seed": seed, **found})
    print(json.dumps({"tally": tally, "differences": differences}))


if __name__ == "__main__":
    main()
