"""Tests of the promises: a shadow host, a ledger, a state machine over every call, and planted faults."""
