"""Paged attention: the one place where a model and the KV pool meet.

`paged.py` has the step's batch, the protocol of a backend and the handler of a layer; `torch_backend.py` is the
reference, `numba_backend.py` the fast one for CPUs, and `backends.py` chooses device and backend.
It imports `kv/pool.py` and `kernels/`.
Begin with `paged.py`.
"""
