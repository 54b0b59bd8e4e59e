"""Outputs of requests, made from a step's tokens.

`processor.py` turns a step into outputs. `request_output.py` has a request's transcript, and the views of it that
callers read. `embedding.py` is the output of an embedding request. The package imports `text/`, `params/`, and only
types of `model/` and `sampling/`, so that an API process reads outputs without PyTorch. Begin with `processor.py`.
"""
