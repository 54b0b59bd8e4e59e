"""Tests of `pointsman.server.service.service`."""
