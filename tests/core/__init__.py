"""Tests of `pointsman.core`, one file per module: each test's name is a rule, and its body an example of it."""
