"""Keys and values: the pool on the device, and the places for KV outside it.

`pool.py` holds the blocks; `connector.py` answers the scheduler's questions about KV in host memory (`offload.py`) and
in a directory (`store.py`), and moves it; `events.py` publishes what enters and leaves the prefix cache.
It imports `params/` and the engine's counters; a model is known here by its fingerprint only.
Begin with `pool.py`, then `connector.py`.
"""
