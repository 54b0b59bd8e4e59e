"""Speculative decoding: proposes drafts and verifies them.

`prompt_lookup.py` proposes drafts from a request's own tokens (`trail.py`), as many as raise the tokens per second
(`worth.py`); `verification.py` accepts or rejects them after the model has run. The package imports `params/` and the
engine's counters. Begin with `prompt_lookup.py`.
"""
