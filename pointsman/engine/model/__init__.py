"""A model: how it is loaded, checked and made faster, and how one step runs on it.

`loader.py` reads a directory and returns a `LoadedModel`; `check.py` and `self_check.py` refuse what would compute
wrongly; `fusion.py` replaces parts by faster ones; `runner.py` executes a scheduled step: forward pass, then sampling.
It imports `attention/`, `sampling/`, `drafts/`, `kv/`, `text/` and `params/`, and no module that knows an engine.
Begin with `runner.py` for a step, with `loader.py` for a model.
"""
