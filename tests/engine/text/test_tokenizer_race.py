"""Reading tokenizers in several threads at once, like two engine clients in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import threading
from pointsman.engine.text.tokenizer import DEMO_MODEL, read_tokenizer
ready, read = threading.Barrier(3), []
def work():
    ready.wait()
    read.append(read_tokenizer(DEMO_MODEL).vocab_size)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(read))
"""


@pytest.mark.e2e
@pytest.mark.long
def test_two_threads_may_read_the_first_tokenizers_at_once() -> None:
    """Runs in a process that has not imported transformers yet."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.stdout == "3\n", done.stderr[-1000:]
