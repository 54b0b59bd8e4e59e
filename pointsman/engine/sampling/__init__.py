"""From logits to tokens, for all rows of a step at once.

`sampler.py` is the entry: parameters as columns (`batch.py`), edits of logits (`logit_edits.py`), the draw itself
(`race.py`, compiled for CPUs in `race_kernels.py`, for GPUs in `race_triton.py`) and log probabilities (`logprobs.py`).
It imports `params/` and `grammar/`; randomness is a function of seed, position and token alone.
Begin with `sampler.py`.
"""
