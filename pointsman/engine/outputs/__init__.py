"""What callers get back: outputs of requests, made from a step's tokens.

`processor.py` takes in a step and returns outputs; `request_output.py` has a request's transcript and the views of it
that callers read; `embedding.py` is the output of a prompt that becomes a vector.
It imports `text/`, `params/`, and types of `model/` and `sampling/`, so that an API process reads outputs without
PyTorch.
Begin with `processor.py`.
"""
