"""Tests of `pointsman.server.wire`."""
