"""Which block holds what? The pool, the prefix cache over it, and KV from outside the pool.

`manager.py` is what the step calls: look up, allocate, publish, free; `tables.py`, `block_pool.py` and `prefix_tree.py`
are below it, and for models with windows `windows.py`; `connector.py` and `transfers.py` handle KV outside the pool,
`content.py` and `events.py` what other processes see. This package imports `state` and the configuration. Begin with
`manager.py`.
"""
