"""Compiled kernels for CPUs: attention over the paged pool, norms, rotary embeddings, gated activations.

They are written in Python and compiled by numba when they are first needed (a few seconds, kept on disk), so that
installing needs no C compiler. `runtime.py` says how they are called and how they share PyTorch's threads.
"""
