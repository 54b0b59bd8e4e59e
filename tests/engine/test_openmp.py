"""How threads wait is said before PyTorch is loaded, and only where the user has not said it."""

from __future__ import annotations

import os

import pytest

from pointsman.engine.openmp import SPINS, wait_briefly

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("set_before", "after"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
    ids=["nothing", "spins", "policy"],
)
def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch, set_before: dict[str, str], after: dict[str, str]) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    wait_briefly()
    got = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    assert got == after
