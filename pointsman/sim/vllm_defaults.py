"""vLLM's defaults: the settings that vLLM chooses for a device if no option sets them.

The rules are those of `vllm serve` in vLLM 0.32.0 (`vllm/engine/arg_utils.py`, `EngineArgs.get_batch_defaults` for the
API server, and the limits that follow it). The defaults depend on the device's memory, in one case also on the device's
name.
"""

from __future__ import annotations

from typing import NamedTuple

from pointsman.sim.devices import GIB, Device

VLLM_VERSION = "0.32.0"


class VllmDefaults(NamedTuple):
    """Settings of the scheduler that depend on the device."""

    max_num_batched_tokens: int
    max_num_seqs: int


def vllm_defaults(device: Device, max_model_len: int, tensor_parallel: int = 1) -> VllmDefaults:
    """The defaults of `vllm serve` on `tensor_parallel` devices of this type, with chunked prefill and without a
    mode."""
    if device.name == "cpu":
        budget, num_seqs = 2048 * tensor_parallel, 128 * tensor_parallel
    elif device.memory >= 160 * GIB:
        budget, num_seqs = 16384, 1024
    elif device.memory >= 70 * GIB and "a100" not in device.name.lower():
        budget, num_seqs = 8192, 1024
    else:
        budget, num_seqs = 2048, 256
    budget = min(budget, num_seqs * max_model_len)
    return VllmDefaults(budget, min(num_seqs, budget))
