"""KV memory: block tables, the block pool, the prefix cache, and KV outside the pool.

`manager.py` looks up, allocates, publishes and frees blocks. It alone owns the pool (`block_pool.py`) and the prefix
tree (`prefix_tree.py`), and works with `tables.py` and `windows.py`. `connector.py` and `transfers.py` handle KV
outside the pool. `digests.py` and `events.py` name blocks for other processes.
"""
