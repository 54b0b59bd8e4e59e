"""A long text of others: Python's documentation, from Debian's package `python3-doc`."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

TIMEOUT = 120.0
"""Seconds for one command of apt."""


def _output(*command: str, folder: Path) -> str:
    """Of a command; skips the test where it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        pytest.skip("the Debian archive does not answer")
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)} fails: {done.stderr.strip()[-200:]}")
    return done.stdout


def _downloaded(package: str, folder: Path) -> Path:
    _output("apt-get", "download", package, folder=folder)
    (archive,) = folder.glob(f"{package}_*.deb")
    return archive


@cache
def tutorial() -> str:
    """The sources of Python's tutorial, in reading order by name; skips the test where apt or its archive is out of
    reach."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("apt is not installed")
    with tempfile.TemporaryDirectory(prefix="pointsman-python-docs-") as name:
        folder = Path(name)
        documents = _output(
            "dpkg-deb", "--field", str(_downloaded("python3-doc", folder)), "Depends", folder=folder
        ).strip()  # such as python3.11-doc
        _output("dpkg", "--extract", str(_downloaded(documents, folder)), "files", folder=folder)
        sources = sorted(folder.glob("files/usr/share/doc/*/html/_sources/tutorial/*.rst.txt"))
        if not sources:
            pytest.skip(f"{documents} has no sources of the tutorial")
        return "\n".join(source.read_text(encoding="utf-8") for source in sources)
