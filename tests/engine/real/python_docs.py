"""Provides a long published text: Python's tutorial, from a dependency of Debian's package `python3-doc`."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

TIMEOUT = 120.0
"""Seconds for a download."""


def _downloaded(package: str, folder: Path) -> Path:
    """Download a Debian package into the folder; return its path. Skips the test if Debian's archive cannot be
    reached."""
    command = ["apt-get", "download", package]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        pytest.skip("Debian's archive does not answer")
    found = list(folder.glob(f"{package}_*.deb"))
    if done.returncode != 0 or not found:
        pytest.skip(f"Debian's archive is out of reach: {done.stderr.strip()[-200:]}")
    return found[0]


@cache
def tutorial() -> str:
    """The sources of Python's tutorial, chapters by name; skips the test without apt or its archive."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("apt is not installed")
    with tempfile.TemporaryDirectory(prefix="pointsman-python-docs-") as name:
        folder = Path(name)
        field = ["dpkg-deb", "--field", str(_downloaded("python3-doc", folder)), "Depends"]
        depends = subprocess.run(field, capture_output=True, text=True, check=True).stdout
        documents = re.match(r"python3[\w.]*-doc", depends)
        assert documents is not None, f"python3-doc depends on {depends!r}"
        subprocess.run(["dpkg-deb", "--extract", str(_downloaded(documents[0], folder)), str(folder)], check=True)
        sources = sorted(folder.glob("usr/share/doc/python3.*[0-9]/html/_sources/tutorial/*.rst.txt"))
        return "\n".join(source.read_text(encoding="utf-8") for source in sources)
