"""Kernels for CPUs and GPUs: attention over the paged pool, norms, rotary embeddings, gated activations.

Kernels for CPUs are written in Python and compiled by numba on first use (a few seconds, cached on disk), so the
installation needs no C compiler. Kernels for GPUs are in Triton. The package imports `threads.py` and nothing else of
the engine. Begin with `runtime.py`: how compiled kernels are called, and how they share PyTorch's threads.
"""
