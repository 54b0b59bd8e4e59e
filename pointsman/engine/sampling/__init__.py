"""Samples tokens from logits, for all rows of a step in one call.

`sampler.py` is the entry point. It uses columns of parameters (`batch.py`), edits of logits (`logit_edits.py`), the
random draw (`race.py`, compiled for CPUs in `race_kernels.py`, for GPUs in `race_triton.py`) and log probabilities
(`logprobs.py`). Randomness is a function of seed, position and token only. The package imports `params/` and
`grammar/`. Begin with `sampler.py`.
"""
