"""The simulator: the real scheduler under a virtual clock, with a model of how long a step takes.

It imports NumPy, the standard library, `pointsman.core` and `pointsman.traces`, and SciPy for a fit. Begin with
`simulator.py`; one scheduler under the clock is `replica.py`. What arrives is in `workload.py`, what a step costs in
`step_time.py`, from a model (`shapes.py`) and a device (`devices.py`); how many KV blocks there are, in `memory.py`.
What an engine did becomes step times in `calibrate.py`. What a run found is in `report/`; how many requests a second
meet given targets, in `capacity.py`; which settings serve most of them in time, in `tune.py`, which needs Optuna; what
is true of claims about schedulers, in `scenarios/`.
"""
