"""The simulator: the real scheduler under a virtual clock, with a model of how long a step takes. What a workload sends
is in `workload.py`; may import `pointsman.core` and `pointsman.traces`."""
