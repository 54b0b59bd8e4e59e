"""Tests of `pointsman.server.wire.messages`."""
