"""Compiled kernels for CPUs: attention over the paged pool, norms, rotary embeddings, gated activations.

They are written in Python and compiled by numba when they are first needed (a few seconds, kept on disk), so that
installing needs no C compiler. The package imports `threads.py` and nothing else of the engine.
Begin with `runtime.py`: how kernels are called, and how they share PyTorch's threads.
"""
