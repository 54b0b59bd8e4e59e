"""Keys and values: the KV pool on the device, and KV in host memory and on disk.

`pool.py` holds the blocks. `connector.py` finds and moves KV in host memory (`offload.py`) and in a directory
(`store.py`) for the scheduler. `events.py` publishes changes of the prefix cache. The package imports `params/` and the
engine's counters; the only thing that it reads of a model is the fingerprint. Begin with `pool.py`, then
`connector.py`.
"""
