from __future__ import annotations
from typing import NamedTuple, Protocol
import numpy as np
class StepLoad(NamedTuple):
    num_tokens: int
    num_rows: int
    num_context_tokens: int
    num_attended: int
    num_samples: int
class StepTime(Protocol):
    def of_step(self, load: StepLoad) -> float: ...
    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int): ...
class LinearStepTime:
    def __init__(self, c=None, *, seconds=0.0, per_row=0.0, per_token=0.0, per_context_token=0.0, per_attended=0.0): self.c=c or (seconds,per_row,per_token,per_context_token,per_attended)
    def of_step(self, l):
        c=self.c
        return c[0]+c[1]*l.num_rows+c[2]*l.num_tokens+c[3]*l.num_context_tokens+c[4]*l.num_attended
    def of_decodes(self, n, ctx, k):
        c=self.c
        first=c[0]+(c[1]+c[2])*n+(c[3]+c[4])*ctx
        return first+(c[3]+c[4])*n*np.arange(k)
