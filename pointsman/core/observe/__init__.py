"""What was decided, and why? This package listens to the scheduler's events and reads, and decides nothing.

`explain.py` explains why a request waits, `stats.py` counts, `request_log.py` logs the events of each request,
`invariants.py` checks invariants, `watchdog.py` finds requests without progress. It may import all of the core but the
scheduler. The events themselves are in `state/events.py`. Begin with `explain.py`.
"""
