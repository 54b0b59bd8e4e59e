"""Structured outputs: compiles grammars while steps run, and masks the tokens that a grammar does not allow next.

`compiler.py` belongs to the engine's thread. `process.py` is the engine's side of the process that compiles, and
`worker.py` is the program of this process. `matcher.py` follows a request's output through its grammar. `vocabulary.py`
has the bytes of each token. The package imports `params/` and `text/`. Begin with `compiler.py`.
"""
