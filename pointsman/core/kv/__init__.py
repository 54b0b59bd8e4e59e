"""KV memory. `manager.py` looks up, allocates, publishes and frees; it alone owns the pool and the prefix tree.

`manager.py` works with `tables.py`, `windows.py`, `block_pool.py` and `prefix_tree.py`. `connector.py` and
`transfers.py` handle KV outside the pool, `content.py` and `events.py` what other processes see.
"""
