"""The simulator: runs the real scheduler under a virtual clock, with a model of how long a step takes.

It imports NumPy, the standard library, `pointsman.core` and `pointsman.traces`; a fit also needs SciPy. Start reading
at
`simulator.py`; `replica.py` runs one scheduler under the clock. `workload.py` generates the arrivals. `step_time.py`
computes the cost of a step from a model (`shapes.py`) and a device (`devices.py`). `memory.py` computes the number of
KV
blocks. `calibrate.py` turns a log of an engine into step times. `report/` presents the results of a run. `capacity.py`
finds the request rate that meets given targets. `tune.py` finds the settings that serve most requests in time; it needs
Optuna. `scenarios/` tests claims about schedulers.
"""
