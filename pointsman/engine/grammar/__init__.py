"""Structured outputs: grammars are compiled beside the steps, and say which tokens may come next.

`compiler.py` belongs to the engine's thread; `process.py` and `worker.py` are the two sides of the process that
compiles; `matcher.py` follows a request's output through its grammar; `vocabulary.py` has the bytes of each token.
It imports `params/` and `text/`.
Begin with `compiler.py`.
"""
