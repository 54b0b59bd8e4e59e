"""Tests of `pointsman.server`, in the packages of what they test; tests of whole processes stand here."""
