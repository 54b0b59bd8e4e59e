"""Tests of `pointsman.server.service`."""
