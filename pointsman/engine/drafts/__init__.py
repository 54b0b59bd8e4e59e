"""Speculative decoding: proposes drafts and verifies them.

`prompt_lookup.py` proposes drafts from a request's own tokens (`ngram_lookup.py`), as many as raise the tokens per
second (`draft_counts.py`); `verification.py` accepts or rejects them after the model has run. The package imports
`params/` and the engine's counters. Begin with `prompt_lookup.py`.
"""
