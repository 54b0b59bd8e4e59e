"""Which request is next, how many tokens, how much stays free, which request is preempted?

`order.py` and `victim.py` choose requests; every other file is a gate of admission, with the protocol of `gate.py`:
limits, reserves, adapter slots, partial prefills, the encoder budget. Policies decide and never move a request. They
import `kv`, `state` and the configuration. Begin with `gate.py`.
"""
