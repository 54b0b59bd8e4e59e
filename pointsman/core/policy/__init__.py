"""Which request is next, how many tokens, how much stays free, which request is preempted?

Policies can be exchanged, and are found by name (`registry.py`): orders (`order.py`), victims (`victim.py`), reserves
(`reserve.py`), limits (`limits.py`) and evictions (`eviction.py`). Gates (`gate.py`) are the conditions of an
admission: reserves, limits, adapter slots, partial prefills, encoder budget. They read a view (`view.py`), decide and
never move a request; they import `kv`, `state` and the configuration. Begin with the file of the question; `policy.py`
says what all policies have in common.
"""
