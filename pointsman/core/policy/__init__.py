"""Which request is next, how many tokens, how much stays free, which request is preempted?

Policies (`policy.py`) can be exchanged: orders, victims, reserves and limits, found by name (`registry.py`). Gates
(`gate.py`) are the conditions of an admission: reserves, limits, adapter slots, partial prefills, encoder budget. They
read a view (`view.py`), decide and never move a request; they import `kv`, `state` and the configuration. Begin
with `policy.py`.
"""
