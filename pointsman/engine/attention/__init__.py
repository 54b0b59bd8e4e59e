"""Paged attention: computes a model's attention over the KV pool.

`paged.py` has the step's batch, the protocol of a backend and the handler of a layer. `torch_backend.py` is the
reference backend, `numba_backend.py` the fast backend for CPUs, and `triton_backend.py` the backend for GPUs.
`backends.py` chooses device and backend. The package imports `kv/pool.py` and `kernels/`. Begin with `paged.py`.
"""
