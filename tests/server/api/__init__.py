"""Tests of `pointsman.server.api`."""
