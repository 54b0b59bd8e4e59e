"""Policies: choose the next request, its number of tokens, the blocks that stay free, and the request to preempt.

Policies can be exchanged, and are looked up by name (`registry.py`): orders (`order.py`), victims (`victim.py`),
reserves (`reserve.py`), limits (`limits.py`) and evictions (`eviction.py`). Gates (`gate.py`) are the conditions of an
admission: reserves, limits, adapter slots, partial prefills, encoder budget. Policies and gates read a view (`view.py`)
and decide; they never move a request. This package imports `kv`, `state` and the configuration. `policy.py` has the
base class of policies.
"""
