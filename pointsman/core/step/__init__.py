"""The parts of a step, one file for each part of `schedule` and `update`.

`priority_preemption.py`, `running.py`, `admission.py` and `emit.py` are the parts of `schedule`, in order; `update.py`
applies results; `drafts.py`, `loading.py`, `prompt_parts.py` and `rewind.py` handle special cases. `request_table.py`
tracks whether each request is queued, parked or running, and moves requests between these places; `assembly.py` creates
and connects the parts. This package imports `policy`, `kv` and `state`; only `scheduler.py` and `observe` import it.
Begin with `request_table.py`.
"""
