"""What all engine tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pointsman.engine.attention import numba_backend as numba_attention
from pointsman.engine.attention.paged import PagedBatch
from tests.forked_engines import forked_processes


@pytest.fixture(autouse=True, scope="session")
def compilers() -> Iterator[None]:
    """Grammar compilers are forked."""
    with forked_processes():
        yield


@pytest.fixture(autouse=True)
def attention_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several steps in flight the tiny models of the tests run ahead as larger ones do: while a layer attends,
    all is done that there is to do.
    """
    do_meanwhile = PagedBatch.do_meanwhile
    monkeypatch.setattr(numba_attention, "LONG", 0)
    monkeypatch.setattr(PagedBatch, "do_meanwhile", lambda batch, _: do_meanwhile(batch, lambda: True))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and threads that wait for each other on a busy machine cost a lot."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
