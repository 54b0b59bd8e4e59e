"""What a caller asks for: parameters of a request and of an engine, checked when they are built.

`SamplingParams` and `PoolingParams` (one request), `StructuredOutputsParams` (the form of its text), the arguments of
`Engine` that need no model to be checked, and how a prompt with its parameters becomes the scheduler's `Request`.
It imports `pointsman.core` and no other package of the engine; nothing here loads PyTorch.
Begin with `sampling.py`; then `requests.py` for what becomes of it.
"""
