"""Tests of `pointsman.server.metrics.exposition`."""
