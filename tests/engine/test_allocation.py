"""Large pieces of memory stay in the heap, unless the user has said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

PAGE_FAULTS = """
import resource, sys
import torch
from pointsman.engine.allocation import keep_freed_pages
told = keep_freed_pages() if sys.argv[1] == "keep" else None
for _ in range(3):
    torch.zeros(4 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.zeros(4 << 20)  # 16 MiB
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
NUM_PAGES = 8 * (16 << 20) // os.sysconf("SC_PAGE_SIZE")


def run(mode: str, **environment: str) -> tuple[str, int]:
    command = [sys.executable, "-c", PAGE_FAULTS, mode]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    told, faults = done.stdout.split()
    return told, int(faults)


def test_freed_pages_serve_again() -> None:
    told, faults = run("keep", MALLOC_ARENA_MAX="1")
    assert told == "True" and faults < NUM_PAGES / 20


def test_what_the_user_says_counts() -> None:
    told, faults = run("keep", MALLOC_MMAP_THRESHOLD_="1048576")
    assert told == "False" and faults > 8, "every piece is mapped anew"
