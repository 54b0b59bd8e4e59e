"""Loads, checks and fuses a model, and runs scheduled steps on it.

`loader.py` reads a directory and returns a `LoadedModel`. `check.py` and `self_check.py` refuse models that would
compute wrongly on the paged path. `fusion.py` replaces parts of a model by faster parts. `runner.py` executes a
scheduled step: forward pass, then sampling. The package imports `attention/`, `sampling/`, `drafts/`, `kv/`, `text/`
and `params/`, and no module that knows an engine. To understand a step, begin with `runner.py`; to understand loading,
begin with `loader.py`.
"""
