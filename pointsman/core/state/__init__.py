"""State: requests, the columns of running requests, and the inputs and outputs of a scheduler.

The lowest package of the core: of Pointsman it imports only `core/errors.py`. It stores the state of requests and rows
and keeps it consistent; `core/step` decides when and why the state changes. Begin with `batch.py` (the columns of
running requests), then `request.py` (arguments and state of a request), then `output.py` (the arrays that a host
receives and returns). `core/scheduler.py` describes what a host may write. A name with an underscore is for the core
alone.
"""
