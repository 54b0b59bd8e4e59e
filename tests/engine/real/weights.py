"""The named models with published weights."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from pointsman.engine.sources.named import installed_file

NAMES = ("smollm2", "gemma3-270m")


def weights_of(name: str) -> Path:
    """The GGUF file of a named model in the user's folder; skips the test if the model is not installed."""
    with mock.patch.dict(os.environ, POINTSMAN_MODELS=os.environ["POINTSMAN_TEST_MODELS"]):
        path = installed_file(name)
    if path is None:
        pytest.skip(f"{name} is not installed: pointsman models get {name}")
    return path
