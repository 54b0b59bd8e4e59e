"""Hosts other than our own: each a thin adapter over `pointsman.core`, which imports its host where it is used."""
