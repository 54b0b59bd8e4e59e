"""Tests of `pointsman.server`, in the same packages as the code; tests of whole processes are here."""
