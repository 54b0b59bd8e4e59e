"""What was decided, and why? It listens to the scheduler's events and reads, and decides nothing.

`explain.py` says why a request waits, `stats.py` counts, `request_log.py` notes what happened to each request,
`invariants.py` checks the promises, `watchdog.py` finds requests without progress. It may import all of the core
but the scheduler. The events themselves are in `state/events.py`. Begin with `explain.py`.
"""
