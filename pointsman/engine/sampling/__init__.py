"""Samples tokens from logits, for all rows of a step at once.

`sampler.py` is the entry point. It uses parameters as columns (`batch.py`), edits of logits (`logit_edits.py`), the
draw itself (`race.py`, compiled for CPUs in `race_kernels.py`, for GPUs in `race_triton.py`) and log probabilities
(`logprobs.py`). Randomness is a function of seed, position and token only. The package imports `params/` and
`grammar/`. Begin with `sampler.py`.
"""
