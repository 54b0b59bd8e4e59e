"""Tests of `pointsman.server.metrics`."""
