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
    """Fork grammar compilers."""
    with forked_processes():
        yield


@pytest.fixture(autouse=True)
def attention_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several steps in flight, let the tests' tiny models run ahead like larger ones: while a layer attends, all
    parts of other steps are done.
    """
    do_meanwhile = PagedBatch.do_meanwhile
    monkeypatch.setattr(numba_attention, "LONG", 0)
    monkeypatch.setattr(PagedBatch, "do_meanwhile", lambda batch, _: do_meanwhile(batch, lambda: True))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: tiny models gain nothing from more, which cost a lot on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
