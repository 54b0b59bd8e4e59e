"""Sharing of the compiler among tenants: fair order, limits per tenant, and grammars of several tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pointsman.core import Request
from pointsman.engine import GrammarError, GrammarQueueFullError, SamplingParams, StructuredOutputsParams
from pointsman.engine.grammar import compiler as grammar_compiler
from pointsman.engine.grammar.compiler import GrammarCompiler, Outcome
from pointsman.engine.grammar.process import Cancelled, CompiledGrammar, GrammarLimits, Job, OutOfTime
from tests.engine.hopeless_grammar import wait_until
from tests.engine.text_tokenizers import byte_tokenizer

VOCAB_SIZE, EOS = 199, 2
SLOW = "slow"
"""How the expressions of grammars begin that take longer than their slice."""


class Process:
    """In place of the process: a job is compiled when the test says so.

    A slow one is out of time at once when it is new.
    """

    num_restarts = 0
    pid = None

    def __init__(self) -> None:
        self.order: list[str] = []
        """Expressions that were begun."""
        self._released: set[str] = set()
        self._is_closed = False

    def compile(self, job: Job, cpu_slice: float = 0.0, niceness: int = 0) -> CompiledGrammar:
        self.order.append(job.spec.text)
        if cpu_slice and job.spec.text.startswith(SLOW):
            raise OutOfTime("it takes longer")
        wait_until(lambda: job.is_cancelled or self._is_closed or job.spec.text in self._released)
        if job.is_cancelled or self._is_closed:
            raise Cancelled
        return CompiledGrammar(None, None, 1, GrammarLimits())  # type: ignore[arg-type]  # never used

    def release(self, *expressions: str) -> None:
        """Let these jobs finish compiling, now or when they are taken."""
        self._released.update(expressions)

    def close(self) -> None:
        self._is_closed = True


class Compiler:
    """A compiler with such a process."""

    def __init__(self, compiler: GrammarCompiler, process: Process) -> None:
        self.compiler = compiler
        self.process = process

    def add(self, tenant: str, expression: str) -> Request:
        """A request of a tenant, for a regular expression."""
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=expression))
        request = Request(
            f"{tenant} {expression} {id(params)}", [1], arrival_time=0.0, max_tokens=9, metadata=params, tenant=tenant
        )
        self.compiler.add(request)
        return request

    def begun(self, *expressions: str) -> bool:
        """Wait until exactly these jobs were begun, in any order; return whether no other was."""
        wait_until(lambda: len(self.process.order) >= len(expressions))
        return sorted(self.process.order) == sorted(expressions)

    def take(self, count: int) -> dict[Request, Outcome]:
        """Take this many requests, with their outcomes."""
        found: dict[Request, Outcome] = {}

        def has_all() -> bool:
            found.update(self.compiler.take_finished())
            return len(found) >= count

        wait_until(has_all)
        assert len(found) == count
        return found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Compiler]]:
    made = []

    def make(**constants: int) -> Compiler:
        for name, value in constants.items():
            monkeypatch.setattr(grammar_compiler, name, value)
        process: Any = Process()
        monkeypatch.setattr(grammar_compiler, "GrammarProcess", lambda read, limits: process)
        made.append(GrammarCompiler(byte_tokenizer(VOCAB_SIZE), VOCAB_SIZE, (EOS,)))
        return Compiler(made[-1], process)

    yield make
    for compiler in made:
        compiler.close()


def test_grammars_of_one_tenant_do_not_get_all_threads(shared: Callable[..., Compiler]) -> None:
    one = shared()
    for number in range(20):
        one.add("a", f"a{number}")
    assert one.begun("a0", "a1")
    request = one.add("b", "b")
    one.process.release("b")
    assert list(one.take(1)) == [request]


def test_slow_grammars_of_one_tenant_do_not_get_all_threads(shared: Callable[..., Compiler]) -> None:
    one = shared()
    for number in range(20):
        one.add("a", f"{SLOW} {number}")
    wait_until(lambda: len(one.process.order) == 21)  # all once, and the first again
    request = one.add("b", f"{SLOW} b")
    one.process.release(f"{SLOW} b")
    assert list(one.take(1)) == [request]


def test_a_tenant_is_served_before_the_backlog_of_another_tenant(shared: Callable[..., Compiler]) -> None:
    one = shared(NUM_THREADS=1, MAX_OUT=1)
    for number in range(20):
        one.add("a", f"a{number}")
    assert one.begun("a0")
    one.add("b", "b")
    one.process.release("a0")
    wait_until(lambda: len(one.process.order) == 2)
    one.process.release("a1", "b")
    wait_until(lambda: len(one.process.order) >= 3)
    assert "b" in one.process.order[:3]


def test_a_full_queue_of_one_tenant_is_not_full_for_others(shared: Callable[..., Compiler]) -> None:
    one = shared(MAX_WAITING=6)
    for number in range(2):
        one.add("a", f"a{number}")
    assert one.begun("a0", "a1")
    for number in range(2, 8):
        one.add("a", f"a{number}")
    assert not one.compiler.take_finished()
    late = one.add("a", "late")
    error = one.take(1)[late]
    assert isinstance(error, GrammarQueueFullError)
    assert "6 of this tenant (at most 6 now) and 6 of all tenants (at most 8)" in str(error)
    others = [one.add("b", f"b{number}") for number in range(2)]  # one is begun, one waits
    one.process.release("b0", "b1")
    assert set(one.take(2)) == set(others)


def test_a_grammar_of_two_tenants_is_compiled_once(shared: Callable[..., Compiler]) -> None:
    one = shared(MAX_WAITING=30)
    for number in range(20):
        one.add("a", f"a{number}")
    assert one.begun("a0", "a1")
    first = one.add("a", "both")  # after all the others
    second = one.add("b", "both")
    one.process.release("both")
    assert set(one.take(2)) == {first, second}
    assert sorted(one.process.order) == ["a0", "a1", "both"]
    for number in range(10):  # its place in the other tenant's queue is free again
        one.add("a", f"more {number}")
    assert not one.compiler.take_finished()


def test_a_grammar_is_compiled_though_one_of_its_two_tenants_cancels(shared: Callable[..., Compiler]) -> None:
    one = shared(NUM_THREADS=1)
    blocking = one.add("c", "c")
    assert one.begun("c")
    first, second = one.add("a", "both"), one.add("b", "both")
    one.compiler.forget(first)
    one.compiler.forget(blocking)
    one.process.release("both")
    assert list(one.take(1)) == [second]
    assert one.process.order == ["c", "both"]


def test_a_full_queue_refuses_its_own_tenant_only(shared: Callable[..., Compiler]) -> None:
    one = shared(MAX_SLOW_WAITING=1)
    one.add("a", f"{SLOW} 0")
    wait_until(lambda: len(one.process.order) == 2)  # it occupies the slow thread
    one.add("a", f"{SLOW} 1")
    wait_until(lambda: len(one.process.order) == 3)
    one.process.release(f"{SLOW} 2")
    with one.compiler._worker.lock:  # add both before its slice begins
        mine, theirs = one.add("a", f"{SLOW} 2"), one.add("b", f"{SLOW} 2")
    found = one.take(2)
    assert isinstance(found[mine], GrammarQueueFullError) and isinstance(found[theirs], CompiledGrammar)
    assert one.compiler.num_waiting == 2


def test_a_refused_grammar_is_compiled_for_another_tenant(shared: Callable[..., Compiler]) -> None:
    one = shared(MAX_WAITING=1)
    one.add("a", "a0")
    assert one.begun("a0")
    one.add("a", "a1")
    assert one.begun("a0", "a1")
    one.add("a", "waits")
    refused, accepted = one.add("a", "both"), one.add("b", "both")  # before the refusal is taken
    one.process.release("both")
    found = one.take(2)
    assert isinstance(found[refused], GrammarQueueFullError) and isinstance(found[accepted], CompiledGrammar)


def test_a_grammar_without_requests_leaves_the_queue(shared: Callable[..., Compiler]) -> None:
    one = shared(MAX_WAITING=3)
    for number in range(2):
        one.add("a", f"a{number}")
    assert one.begun("a0", "a1")
    for number in range(300):
        one.compiler.forget(one.add("a", f"gone {number}"))
        two = [one.add(tenant, f"of two {number}") for tenant in "ab"]
        wait_until(lambda number=number: f"of two {number}" in one.process.order)  # type: ignore[misc]  # at b's turn
        for request in two:
            one.compiler.forget(request)
    stage = one.compiler._worker.new
    assert (len(stage._queue), stage._capacity.total) == (0, 0)
    assert not any(expression.startswith("gone") for expression in one.process.order)
    for number in range(3):
        one.add("a", f"later {number}")
    assert not one.compiler.take_finished()


def test_failing_to_start_a_thread_is_not_a_grammar_error(
    shared: Callable[..., Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = shared()

    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        with pytest.raises(GrammarError, match="grammars cannot be compiled now: can't start new thread"):
            one.add("a", "a")
    assert not one.compiler.num_waiting
    request = one.add("a", "a")
    one.process.release("a")
    assert list(one.take(1)) == [request]
