"""Speculative decoding: which tokens are proposed, how many are worth it, and which of them are accepted.

`prompt_lookup.py` proposes drafts from a request's own tokens (`trail.py`) as far as they pay (`worth.py`);
`verification.py` judges them once the model has run.
It imports `params/` and the engine's counters.
Begin with `prompt_lookup.py`.
"""
