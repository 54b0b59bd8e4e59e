"""Where is each fact stored? Requests, the columns of running ones, and the inputs and outputs of a scheduler.

The lowest package of the core: it imports `core/errors.py` and nothing else of Pointsman. What changes a fact, and why,
is in `core/step`; here are the facts and the operations that keep them consistent. Begin with `batch.py` (the
columns of running requests), then `request.py` (what was asked, what is known), then `output.py` (the arrays that a
host gets and gives). What a host may write: `core/scheduler.py`. A name with an underscore is for the core alone.
"""
