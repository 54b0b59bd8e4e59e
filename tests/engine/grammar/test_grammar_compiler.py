"""Compiling grammars with a real process: limits, failures, cancellation, and caching."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from pointsman.core import Request
from pointsman.engine import GrammarError, SamplingParams, StructuredOutputsParams
from pointsman.engine.grammar import compiler as grammar_compiler
from pointsman.engine.grammar import process as grammar_process
from pointsman.engine.grammar.compiler import GrammarCache, GrammarCompiler, GrammarQueueFullError
from pointsman.engine.grammar.process import CompiledGrammar, GrammarLimits
from pointsman.engine.params.structured_outputs import GrammarSpec
from tests.engine.hopeless_grammar import HOPELESS, PATIENCE, is_alive, wait_until
from tests.engine.text_tokenizers import byte_tokenizer

pytestmark = pytest.mark.e2e

VOCAB_SIZE, EOS = 199, 2
AMBIGUOUS = "((a{1,1000}){1,1000}b?){1,1000}"
"""A regular expression that compiles at once; then each token takes longer than the one before, up to a second."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(VOCAB_SIZE)


@pytest.fixture
def make(tokenizer: Any) -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def one(**limits: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,), limits=GrammarLimits(**limits)))
        return made[-1]

    yield one
    for compiler in made:
        compiler.close()


@pytest.fixture(scope="module")
def shared(tokenizer: Any) -> Iterator[GrammarCompiler]:
    """A compiler with short limits, for tests that do not break it."""
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,), limits=GrammarLimits(timeout=2.0))
    yield compiler
    compiler.close()


def request_with(tenant: str = "", **options: Any) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**options))
    return Request(str(id(params)), [1], arrival_time=0.0, max_tokens=9, metadata=params, tenant=tenant)


def take(compiler: GrammarCompiler, count: int = 1) -> list[tuple[Request, CompiledGrammar | GrammarError]]:
    found: list[tuple[Request, CompiledGrammar | GrammarError]] = []
    deadline = time.monotonic() + PATIENCE
    while len(found) < count and time.monotonic() < deadline:
        compiler.wait(1.0)
        found += compiler.take_finished()
    assert len(found) == count
    return found


def outcome(compiler: GrammarCompiler, **options: Any) -> CompiledGrammar | GrammarError:
    compiler.add(request_with(**options))
    ((_, found),) = take(compiler)
    return found


def allowed_at_first(grammar: CompiledGrammar) -> bytes:
    """The bytes with which a text may begin."""
    bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
    xgrammar.GrammarMatcher(grammar.compiled).fill_next_token_bitmask(bitmask)
    tokens = grammar.vocabulary.tokens
    return b"".join(sorted(tokens[i] for i in range(VOCAB_SIZE) if int(bitmask[0, i // 32]) >> (i % 32) & 1))


def test_grammars_of_every_kind_are_compiled(shared: GrammarCompiler) -> None:
    for options, first in (
        ({"json": {"enum": [1, True]}}, b"1t"),
        ({"json_object": True}, b"{"),
        ({"regex": "[x-z]+"}, b"xyz"),
        ({"choice": ["no", "yes", "never"]}, b"ny"),
        ({"grammar": 'root ::= other "b"\nother ::= "c" | "d"'}, b"cd"),
    ):
        grammar = outcome(shared, **options)
        assert isinstance(grammar, CompiledGrammar)
        assert allowed_at_first(grammar) == first


def test_equal_grammars_are_compiled_once_and_cached(shared: GrammarCompiler) -> None:
    requests = [request_with(regex="once+") for _ in range(3)]
    assert shared.find(requests[0].metadata) is None
    for request in requests:
        shared.add(request)
    assert shared.num_waiting == 3
    found = take(shared, 3)
    assert [request for request, _ in found] == requests
    (grammar,) = {id(grammar): grammar for _, grammar in found}.values()
    assert shared.num_waiting == 0
    assert shared.find(request_with(regex="once+").metadata) is grammar
    assert shared.find(SamplingParams()) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "("}, "the regular expression '(' cannot be used:"),
        ({"regex": "a(?=b)"}, "a lookahead at character 2"),
        ({"regex": r"(a)\1"}, "a back reference"),
        ({"regex": r"\ba"}, "a word boundary"),
        ({"grammar": 'root ::= "a'}, "the grammar 'root ::= \"a' cannot be used:"),
        ({"grammar": 'start ::= "a"'}, "root"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"json": {"type": "string", "pattern": "[z-a]"}}, "in the pattern '[z-a]' the expression has a range"),
        ({"grammar": 'root ::= "a" x\nx ::= x "b"'}, "it allows no text"),
        ({"regex": "\x7f"}, "after 0 tokens of a text it allows no token of this model"),
    ],
)
def test_compile_errors_have_one_line(shared: GrammarCompiler, options: dict[str, Any], words: str) -> None:
    error = outcome(shared, **options)
    assert isinstance(error, GrammarError)
    assert words in str(error)
    assert "\n" not in str(error) and len(str(error)) < 450 and ".cc" not in str(error)


def test_a_grammar_that_times_out_does_not_delay_a_quick_grammar(shared: GrammarCompiler) -> None:
    shared.add(request_with(regex="[a-f]{3}"))
    take(shared)
    started = time.monotonic()
    shared.add(request_with(grammar=HOPELESS))
    shared.add(request_with(regex="quick+"))
    ((first, quick),) = take(shared)
    assert first.metadata.structured_outputs.regex == "quick+" and isinstance(quick, CompiledGrammar)
    assert time.monotonic() - started < 2.0
    ((_, error),) = take(shared)
    assert isinstance(error, GrammarError)
    assert "takes more than 2 s of processor time" in str(error)


def slow_schema(number: int) -> dict[str, Any]:
    """A schema that takes much longer to compile than the limit: it has a thousand optional properties."""
    return {
        "type": "object",
        "properties": {f"p{number}_{at}": {"enum": [f"v{at}", f"w{at}"]} for at in range(1000)},
        "additionalProperties": False,
    }


def test_each_grammar_that_times_out_delays_others_by_one_slice(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(timeout=60.0)
    assert isinstance(outcome(compiler, regex="a"), CompiledGrammar)
    hopeless = [request_with(json=slow_schema(number)) for number in range(6)]
    for request in hopeless:
        compiler.add(request)
    for number in range(4):  # at once, and while the slow ones are compiled
        grammar = outcome(compiler, choice=["yes", f"no{number}"])
        assert isinstance(grammar, CompiledGrammar)
        assert compiler.num_waiting == 6, "without slices, slow ones would reach their time limit first"
    for request in hopeless:
        compiler.forget(request)


def test_a_grammar_that_exceeds_its_slice_is_still_compiled(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "FIRST_SLICE", 0.001)
    grammar = outcome(make(), choice=["no", "yes"])
    assert isinstance(grammar, CompiledGrammar)
    assert allowed_at_first(grammar) == b"ny"


def test_the_queue_of_new_grammars_is_bounded(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 3)
    compiler = make()
    assert isinstance(outcome(compiler, regex="a"), CompiledGrammar)
    hopeless = [request_with(grammar=f'{HOPELESS} "{number}"') for number in range(2)]
    for request in hopeless:
        compiler.add(request)
    wait_until(lambda: len(children_of(compiler.pid)) == 2)
    accepted = [request_with(regex=f"q{number}") for number in range(3)]
    for request in accepted:
        compiler.add(request)
    compiler.add(request_with(regex="late"))
    ((_, error),) = take(compiler)
    assert isinstance(error, GrammarQueueFullError)
    assert str(error) == (
        "too many grammars wait to be compiled: 3 of this tenant (at most 3 now) and 3 of all tenants (at most 4); "
        "try again later"
    )
    assert {request for request, _ in take(compiler, 3)} == set(accepted)
    assert isinstance(outcome(compiler, regex="late"), CompiledGrammar)  # the refusal was not cached
    for request in hopeless:
        compiler.forget(request)


def test_the_queue_of_slow_grammars_is_bounded(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_SLOW_WAITING", 1)
    monkeypatch.setattr(grammar_compiler, "FIRST_SLICE", 0.1)
    compiler = make()
    requests = [request_with(grammar=f'{HOPELESS} "{number}"') for number in range(4)]
    for request in requests:
        compiler.add(request)
    errors = [error for _, error in take(compiler, 2)]  # one is compiled, one waits
    words = (
        "too many grammars that take longer than 0.1 s wait to be compiled: 1 of this tenant (at most 1 now) and "
        "1 of all tenants (at most 2); try again later"
    )
    assert [(type(error), str(error)) for error in errors] == [(GrammarQueueFullError, words)] * 2
    assert isinstance(outcome(compiler, regex="quick"), CompiledGrammar)
    assert compiler.num_waiting == 2
    for request in requests:
        compiler.forget(request)


def test_a_grammar_failure_is_cached_for_a_limited_time(shared: GrammarCompiler) -> None:
    error = outcome(shared, regex="forgotten(")
    started = time.monotonic()
    assert outcome(shared, regex="forgotten(") is error
    assert time.monotonic() - started < 0.5


def test_the_memory_for_compiling_a_grammar_is_limited(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "subprocess", subprocess)  # a forked child would inherit its parent's memory
    compiler = make(memory=16 * 1024**2, timeout=30.0)
    error = outcome(compiler, grammar=HOPELESS)
    assert isinstance(error, GrammarError)
    assert "it needs more than 0.015625 GiB of memory" in str(error)
    assert isinstance(outcome(compiler, regex="a"), CompiledGrammar)


def test_a_grammar_without_waiting_requests_is_cancelled(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "FIRST_SLICE", 30.0)
    compiler = make(timeout=30.0)
    assert isinstance(outcome(compiler, regex="a"), CompiledGrammar)
    requests = [request_with(grammar=HOPELESS), request_with(grammar=HOPELESS + '"b"'), request_with(regex="c")]
    for request in requests:
        compiler.add(request)
    time.sleep(0.3)
    wait_until(lambda: len(children_of(compiler.pid)) == 2)  # the first two run, the third waits for one of them
    compiler.forget(requests[0])
    ((request, grammar),) = take(compiler)
    assert request is requests[2] and isinstance(grammar, CompiledGrammar)
    compiler.forget(requests[1])
    assert compiler.num_waiting == 0
    wait_until(lambda: not children_of(compiler.pid))


def test_a_killed_grammar_process_is_replaced(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    assert compiler.pid is None
    assert isinstance(outcome(compiler, regex="a"), CompiledGrammar)
    before = compiler.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert isinstance(outcome(compiler, regex="b"), CompiledGrammar)
    assert compiler.pid not in (None, before)


def test_dropping_the_grammar_compiler_ends_its_process(tokenizer: Any) -> None:
    pid = pid_of_one_let_go(tokenizer)
    gc.collect()
    wait_until(lambda: not is_alive(pid))


def pid_of_one_let_go(tokenizer: Any) -> int:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))
    compiler.warm_up()
    wait_until(lambda: compiler.pid is not None)
    assert compiler.pid is not None and is_alive(compiler.pid)
    return compiler.pid


def test_a_killed_engine_leaves_no_grammar_process() -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_grammar_compiler import *
compiler = GrammarCompiler(byte_tokenizer(VOCAB_SIZE), VOCAB_SIZE, (EOS,))
compiler.add(request_with(grammar=HOPELESS))
while compiler.pid is None or not children_of(compiler.pid):
    time.sleep(0.01)
print(compiler.pid, *children_of(compiler.pid), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        engine.kill()
    assert len(pids) == 2
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]


def test_notify_is_called_when_a_grammar_is_done(shared: GrammarCompiler) -> None:
    told = threading.Event()
    shared.notify = told.set
    try:
        shared.add(request_with(regex="bell"))
        assert told.wait(PATIENCE)
        assert len(shared.take_finished()) == 1
        assert shared.take_finished() == []
    finally:
        shared.notify = None


def test_grammars_too_slow_to_use_are_refused(make: Callable[..., GrammarCompiler]) -> None:
    error = outcome(make(timeout=60.0), regex=AMBIGUOUS)
    assert isinstance(error, GrammarError)
    assert re.search(r"a text of \d+ tokens takes \d\.\d\d s of processor time to check", str(error))


# ------------------------------------------------------------------------------------------ what needs no process


def test_models_without_structured_output_are_refused_with_a_reason(tokenizer: Any) -> None:
    structured = request_with(regex="a").metadata
    for compiler, words in (
        (GrammarCompiler(None, VOCAB_SIZE, (EOS,)), "needs a tokenizer"),
        (GrammarCompiler(tokenizer, VOCAB_SIZE, ()), "needs an EOS token"),
        (GrammarCompiler(tokenizer, VOCAB_SIZE, (VOCAB_SIZE,)), "needs an EOS token"),
    ):
        compiler.check(SamplingParams())
        with pytest.raises(GrammarError, match=words):
            compiler.check(structured)
    GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,)).check(structured)


@pytest.mark.parametrize("timeout", [0, -1, 3601, float("nan"), "10", None, True])
def test_invalid_grammar_timeouts_are_refused(tokenizer: Any, timeout: Any) -> None:
    with pytest.raises(ValueError, match="grammar_timeout is"):
        GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,), limits=GrammarLimits(timeout=timeout))


def test_the_grammar_cache_is_bounded_in_bytes() -> None:
    def grammar(num_bytes: int) -> Any:
        return CompiledGrammar(None, None, num_bytes, GrammarLimits())  # type: ignore[arg-type]  # only counted

    cache = GrammarCache(100)
    a, b, c = (GrammarSpec("regex", text) for text in "abc")
    cache.put(a, grammar(40))
    cache.put(b, grammar(40))
    assert cache.get(a) is not None
    cache.put(c, grammar(40))
    assert cache.get(b) is None and cache.get(a) is not None and cache.get(c) is not None
    cache.put(a, grammar(10))
    assert cache.num_bytes == 50
    cache.put(b, grammar(101))
    assert (len(cache), cache.num_bytes) == (2, 50)


# ------------------------------------------------------------------------------------------------------- helpers


def children_of(pid: int | None) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(one) for one in file.read().split()]
