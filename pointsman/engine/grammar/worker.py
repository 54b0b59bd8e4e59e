"""The program of the process that compiles grammars. `process.py` starts it, by its path.

The program imports xgrammar once, and forks a child for each grammar, because compiling cannot be interrupted, may take
any amount of time and memory, and may crash. The kernel ends a child in these cases:

    its processor time is used up                              SIGPROF
    its time is up, waiting included                           SIGALRM
    it asks for more memory than the limit                     allocation fails
    the engine closes the job's socket, or no longer exists    SIGIO

The engine sends the vocabulary once, and then a socket for each job. Child and engine exchange messages over the job's
socket:

    child     b"A" as soon as it runs
    engine    the job as JSON
    child     b"+" and the compiled grammar as JSON, or b"-" and an error; b"\\0" ends either

If the system cannot start a child, this process sends b"!" and the reason over the job's socket. The program and its
children (a process group) end when the engine closes the program's socket. The program imports only the package's
readers of grammars, so that it starts quickly.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import random
import re
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import xgrammar

from pointsman.engine.grammar.gbnf import ROOT, read_grammar
from pointsman.engine.grammar.nodes import written_rules
from pointsman.engine.grammar.regex import read_regex
from pointsman.engine.grammar.schema import schema_tree
from pointsman.engine.grammar.tree import GrammarTree

PROBE_STEPS = 192
"""Number of tokens of a trial text, with which a compiled grammar is probed: a grammar may compile quickly, and then be
too slow to use."""
READY, ACCEPTED, NO_CHILD = b"R", b"A", b"!"

_PLACE_IN_SOURCE = re.compile(r"^\[\d+:\d+:\d+\] \S+:\d+: ")
_WARNING = re.compile(r"warning:?\s*", re.IGNORECASE)


def main(descriptor: int) -> None:
    """Serve jobs until the engine closes the socket with this file descriptor."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C and ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children become no zombies
    with socket.socket(fileno=descriptor) as sock:
        size = int.from_bytes(_receive(sock, 8), "big")
        tokens, stop_token_ids = pickle.loads(_receive(sock, size))
        compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(stop_token_ids)
            ),
            max_threads=1,  # a thread would not survive the fork
            cache_enabled=False,
        )
        del tokens
        try:
            sock.sendall(READY)
        except BrokenPipeError:  # the engine has ended meanwhile
            return
        while True:
            data, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
            if not data:
                break
            for one in descriptors:
                _fork_child(sock, one, compiler)
    os.killpg(0, signal.SIGKILL)  # SIGIO does not end a child that is stopped


def _receive(sock: socket.socket, size: int) -> bytes:
    pieces = []
    while size:
        piece = sock.recv(min(size, 1 << 20))
        if not piece:
            sys.exit(0)  # the engine has ended
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


# ------------------------------------------------------------------------------------------------------- a child


def _fork_child(server: socket.socket, descriptor: int, compiler: xgrammar.GrammarCompiler) -> None:
    try:
        is_child = os.fork() == 0
    except OSError as error:  # no further process can start; this one continues
        with socket.socket(fileno=descriptor) as sock, suppress(OSError):
            sock.sendall(NO_CHILD + str(error).encode())
        return
    if is_child:
        _run_child(server, descriptor, compiler)
    os.close(descriptor)


def _run_child(server: socket.socket, descriptor: int, compiler: xgrammar.GrammarCompiler) -> None:
    """Run one job in this child, and exit."""
    status = 1
    try:
        server.close()
        with socket.socket(fileno=descriptor) as sock:
            _serve_job(sock, compiler)
        status = 0
    except BaseException as error:  # can only be logged
        sys.stderr.write(f"pointsman: a grammar's compiler failed: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def _serve_job(sock: socket.socket, compiler: xgrammar.GrammarCompiler) -> None:
    with suppress(BrokenPipeError):  # the job was cancelled before it began
        sock.sendall(ACCEPTED)
    pieces = []
    while piece := sock.recv(1 << 16):
        pieces.append(piece)
    if not pieces:
        return
    job = json.loads(b"".join(pieces))
    _set_limits(job)
    _end_with_socket(sock)
    try:
        answer = b"+" + _compile(job, compiler).encode()
    except MemoryError:
        answer = b"-" + job["out_of_memory"].encode()
    except Exception as error:
        answer = b"-" + _error_message(error, job).encode()
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    # Without O_ASYNC, because a read at the other end would send SIGIO too.
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) & ~os.O_ASYNC)
    with suppress(BrokenPipeError):
        sock.sendall(answer + b"\0")


def _set_limits(job: dict[str, Any]) -> None:
    """Set the kernel's limits of the job for this process."""
    os.nice(job["niceness"])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, the kernel kills this process first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
        limit = in_use + job["memory_limit"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])


def _end_with_socket(sock: socket.socket) -> None:
    """Let the kernel end this process when the engine closes the other end of the socket: SIGIO, which has no handler
    here, ends the process."""
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(sock, 0)  # POLLHUP is always reported
    if poll.poll(0):
        os._exit(0)  # the other end was closed before


def _compile(job: dict[str, Any], compiler: xgrammar.GrammarCompiler) -> str:
    """Compile and probe the job's grammar; return the compiled grammar as JSON."""
    log = os.memfd_create("warnings")
    os.dup2(log, 2)
    tree = read_tree(job)
    if not tree.remove_empty_options():
        raise ValueError("it allows no text; correct parts that exclude each other, or that refer only to themselves")
    compiled = compiler.compile_grammar(tree.grammar())
    warnings = os.pread(log, 4096, 0).decode("utf-8", "replace").strip()
    if warnings:  # xgrammar ignores a part of the grammar, so texts would not conform to it
        raise ValueError(_WARNING.sub("", _PLACE_IN_SOURCE.sub("", warnings.splitlines()[0])))
    for is_random in (False, True):
        _probe_grammar(compiled, job, is_random)
    answer: str = compiled.serialize_json()
    return answer


def read_tree(job: dict[str, Any]) -> GrammarTree:
    """Read the grammar of a job as a tree, which is ready to be compiled."""
    if job["kind"] == "json":
        return schema_tree(job["text"], any_whitespace=job["any_whitespace"], max_whitespace=job["max_whitespace"])
    rules = read_grammar(job["text"]) if job["kind"] == "ebnf" else {ROOT: read_regex(job["text"])}
    # New names, because a grammar's own names might clash with the compiler's.
    names = {name: f"rule-{number}" for number, name in enumerate(rules)}
    return GrammarTree(xgrammar.Grammar.from_ebnf(written_rules(rules, names), root_rule_name=names[ROOT]))


def _probe_grammar(compiled: xgrammar.CompiledGrammar, job: dict[str, Any], is_random: bool) -> None:
    """Generate a trial text with a compiled grammar. `is_random`: whether each token is chosen at random among the
    allowed tokens; otherwise it is the first allowed token (the text is then mostly short).

    Raises:
        ValueError: no token may continue the text, the grammar refuses a token that it allowed, or checking the text
            takes too long.
    """
    matcher = xgrammar.GrammarMatcher(compiled)
    info = compiled.tokenizer_info
    bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    stop_bits = sum(1 << token_id for token_id in info.stop_token_ids)
    tokens = (1 << info.vocab_size) - 1
    choose = random.Random(0)
    started = time.thread_time()
    for step in range(PROBE_STEPS):
        matcher.fill_next_token_bitmask(bitmask)
        allowed = int.from_bytes(bitmask.numpy().tobytes(), "little") & tokens
        if not allowed:
            raise ValueError(f"after {step} tokens of a text it allows no token of this model; allow other texts")
        allowed &= ~stop_bits
        if not allowed:
            return
        token = _first_set_bit(choose.randrange(info.vocab_size) if is_random else 0, allowed)
        if not matcher.accept_token(token):
            raise ValueError(f"the compiler failed: after {step} tokens it first allows and then refuses token {token}")
        seconds = time.thread_time() - started
        if seconds > job["start_time"] + (step + 1) * job["token_time"]:
            raise ValueError(
                f"a text of {step + 1} tokens takes {seconds:.2f} s of processor time to check; simplify it "
                "(rules that allow one text in many ways are slow)"
            )


def _first_set_bit(place: int, bits: int) -> int:
    """Position of the first set bit of `bits` at `place` or above; if there is none, of the first set bit."""
    above = bits >> place
    if above:
        return place + (above & -above).bit_length() - 1
    return (bits & -bits).bit_length() - 1


def _error_message(error: Exception, job: dict[str, Any]) -> str:
    """The message of an error in one line, without positions in xgrammar's source files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = _PLACE_IN_SOURCE.sub("", lines[0]) if lines else type(error).__name__
    if "bad_alloc" in text:
        return str(job["out_of_memory"])
    return text if len(text) <= 300 else text[:297] + "..."


if __name__ == "__main__":
    main(int(sys.argv[1]))
