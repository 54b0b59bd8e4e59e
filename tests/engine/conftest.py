"""Fixtures of all engine tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pointsman.engine.attention import numba_backend as numba_attention
from pointsman.engine.attention.paged import PagedBatch
from tests.forked_engines import forked_processes


@pytest.fixture(autouse=True, scope="session")
def compilers() -> Iterator[None]:
    """Let the tests' processes for compiling grammars be forked, which is faster than starting new interpreters."""
    with forked_processes():
        yield


@pytest.fixture(autouse=True)
def attention_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several steps in flight, let attention in the tests' tiny models take long enough for all parts of other
    steps, as in larger models."""
    do_meanwhile = PagedBatch.do_meanwhile
    monkeypatch.setattr(numba_attention, "LONG", 0)
    monkeypatch.setattr(PagedBatch, "do_meanwhile", lambda batch, _: do_meanwhile(batch, lambda: True))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: more threads do not make tiny models faster, and make a busy machine much slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
