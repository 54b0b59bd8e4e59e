"""Observers: explain, count and record the decisions of the scheduler, and change none of them.

`explain.py` explains why a request waits, `stats.py` counts, `request_log.py` logs the events of each request,
`invariants.py` checks invariants, `watchdog.py` finds requests without progress, `film.py` records films. The package
may import all of the core except the scheduler. The events are in `state/events.py`. Read `explain.py` first.
"""
