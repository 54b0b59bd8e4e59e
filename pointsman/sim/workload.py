from __future__ import annotations
from dataclasses import dataclass
from typing import Protocol
import numpy as np
from pointsman.traces import TraceRequest, prompt_token_ids
@dataclass(frozen=True, slots=True)
class SimRequest:
    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    block_hash_ids: tuple[int, ...] = ()
    hash_block_size: int = 512
    max_tokens: int | None = None
    priority: int = 0
class Workload(Protocol): ...
def filler_token(i): return i+1000
def blank_prompt(n): return np.frombuffer(bytes(4*n),dtype=np.int32)
def prompt_tokens(r, index, vocab, seed):
    if r.block_hash_ids: return prompt_token_ids(TraceRequest(0.0,r.num_prompt_tokens,0,r.block_hash_ids,r.hash_block_size),vocab,seed,index)
    return np.full(r.num_prompt_tokens, 200_000+index, dtype=np.int32)
class OpenLoop:
    def __init__(self, trace, scale=1.0):
        self.trace=trace; self.scale=scale; self.num_requests=len(trace)
    def first_arrivals(self):
        for i,t in enumerate(self.trace):
            yield t.arrival_time/self.scale, SimRequest(f"r{i}",t.num_prompt_tokens,max(1,t.num_output_tokens),t.block_hash_ids,t.hash_block_size)
    def on_finished(self, r, now): return None
