"""Parameters of a request and of an engine, checked when they are built.

The package has `SamplingParams` and `PoolingParams` (of a request), `StructuredOutputsParams` (the form of its text),
and the arguments of `Engine` that can be checked without a model. `requests.py` makes the scheduler's `Request` from a
prompt and its parameters. The package imports `pointsman.core` and no other package of the engine, and loads no
PyTorch. Begin with `sampling.py`, then `requests.py`.
"""
