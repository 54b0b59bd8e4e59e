"""Films: their content, and refusals."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.core import InvalidTransition, Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.film_format import (
    COLUMNS,
    MAGIC,
    FilmError,
    Op,
    pack_numbers,
    read_chunks,
    read_header,
    unpack_numbers,
    write_chunk,
    write_header,
)
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest
from pointsman.web.film import Film
from pointsman.web.story import Teller, life_of, lives_of, preemptions_of
from pointsman.web.timeline import timeline_of
from tests.forms import short_or_long

CONFIG: dict[str, Any] = {
    "num_blocks": 12,
    "block_size": 4,
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "enable_prefix_caching": True,
    "full_sequence_must_fit": False,
}


def run(lengths: list[tuple[int, int]], **changes: Any) -> tuple[bytes, Scheduler]:
    """Requests of (prompt, output) tokens that arrive together, and the film of their run."""
    scheduler = Scheduler(SchedulerConfig(**{**CONFIG, **changes}))
    file = io.BytesIO()
    film = FilmRecorder(file)
    scheduler.start_film(film)
    for index, (prompt, output) in enumerate(lengths):
        tokens = range(1000 * index, 1000 * index + prompt)
        scheduler.add(Request(f"r{index}", tokens, arrival_time=5.0, max_tokens=output), 5.0)
    now = 5.0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule(now)
        now += 0.5
        scheduler.update(output, StepResult(np.full(int(output.samples.sum()), 7, dtype=np.int32)), now)
    scheduler.remove_listener(film)
    film.close()
    return file.getvalue(), scheduler


@pytest.fixture(scope="module")
def short_pool() -> bytes:
    """Three requests that outgrow the pool."""
    return run([(14, 20), (10, 20), (6, 20)])[0]


def read(data: bytes, **options: Any) -> Film:
    return Film(io.BytesIO(data), **options)


# ------------------------------------------------------------------ content


@pytest.mark.parametrize("differences", [False, True])
def test_decoded_numbers_equal_the_encoded_numbers(differences: bool) -> None:
    rng = np.random.default_rng(3)
    for values in (
        np.zeros(0, dtype=np.int64),
        np.array([0, -1, 1, 63, 64, -64, -65, 2**31, -(2**31), 2**62 - 1, -(2**62)]) // (2 if differences else 1),
        rng.integers(-300, 300, 1000),
    ):
        stream = np.frombuffer(pack_numbers(values.astype(np.int64), differences), dtype=np.uint8)
        ends = (stream < 128).nonzero()[0]
        assert unpack_numbers(stream, ends, differences).tolist() == values.tolist()


def test_a_film_has_every_step_and_its_time(short_pool: bytes) -> None:
    film = read(short_pool)
    assert film.is_complete and film.has_blocks
    assert [frame.step_id for frame in film.frames] == list(range(film.num_steps))
    assert [frame.time for frame in film.frames[:3]] == [0.0, 0.5, 1.0]
    assert film.end == 0.5 * film.num_steps
    assert [(one.request_id, one.num_prompt_tokens, one.max_tokens) for one in film.requests] == [
        ("r0", 14, 20),
        ("r1", 10, 20),
        ("r2", 6, 20),
    ]


def test_state_of_the_first_step_has_its_rows_queue_and_blocker(short_pool: bytes) -> None:
    """The first step has the whole first prompt, and the remaining budget for the second."""
    state = read(short_pool).state_at(0)
    assert [(row.number, row.num_tokens, row.samples) for row in state.batch] == [(0, 14, True), (1, 2, False)]
    assert state.running == [0, 1] and state.waiting == [2]
    assert [len(state.requests[number].table) for number in state.running] == [4, 1]
    assert state.blocker == 2 and state.requests[2].reason == "budget"


def test_sentences_describe_the_decisions_of_each_step(short_pool: bytes) -> None:
    film = read(short_pool)
    teller = Teller(film)
    told = [sentence for frame in range(len(film.frames)) for sentence in teller.decided(frame)]
    assert told[0] == "r0 is added: 14 prompt tokens"
    assert "r0 starts" in told and "r2 waits for 1 more token of the step's budget: the step is full" in told
    preempted = [sentence for sentence in told if "is preempted" in sentence]
    assert preempted and preempted[0].startswith(
        "r2 is preempted: r0 needs a block, and none is free; r2 was the last one admitted; it gives up the KV of "
    )
    assert any(sentence.startswith("r2 resumes, ") for sentence in told)


def preemptions(data: bytes) -> list[str]:
    """The sentence of each preemption, up to its lost tokens."""
    film = read(data)
    told = [Teller(film).sentence(event) or "" for event in film.events(0, None) if event.op is Op.PREEMPTED]
    return [sentence.partition("; it gives up the KV of ")[0] for sentence in told]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "r2 is preempted: r0 needs a block, and none is free; r2 was the last one admitted"),
        (
            {"victim": "lowest-priority"},
            "r2 is preempted: r0 needs a block, and none is free; r2 is the least urgent running request",
        ),
        (
            {"victim": "least-cost", "enable_prefix_caching": False},
            "r2 is preempted: r0 needs a block, and none is free; r2 is the cheapest to recompute of those that free "
            "enough",
        ),
    ],
)
def test_the_sentence_of_a_preemption_names_its_cause_and_the_victim_rule(
    settings: dict[str, Any], expected: str
) -> None:
    assert preemptions(run([(14, 20), (10, 20), (6, 20)], **settings)[0])[0] == expected


def test_the_sentence_of_a_preemption_has_the_number_of_missing_blocks() -> None:
    """All three requests need a block in the same step, and none is free; later the victim itself lacks a block."""
    told = preemptions(run([(16, 20), (16, 20), (16, 20)], max_num_batched_tokens=48, watermark=0.0)[0])
    assert told[0] == ("r2 is preempted: 3 blocks are missing, the first of them for r0; r2 was the last one admitted")
    own = preemptions(run([(13, 20), (14, 20), (20, 20)], num_blocks=13, max_num_batched_tokens=48)[0])
    assert own[0] == "r2 is preempted: it needs a block itself, and none is free; r2 was the last one admitted"


def test_the_sentence_of_a_priority_preemption_names_the_urgent_request() -> None:
    scheduler = Scheduler(SchedulerConfig(**{**CONFIG, "order": "priority"}))
    film = FilmRecorder(file := io.BytesIO())
    scheduler.start_film(film)
    scheduler.add(Request("calm", range(40), arrival_time=0.0, max_tokens=8, priority=5), 0.0)
    for step in range(3):
        output = scheduler.schedule(float(step))
        scheduler.update(output, StepResult([7] * int(output.samples.sum())), step + 0.5)
    scheduler.add(Request("urgent", range(100, 140), arrival_time=3.0, max_tokens=8, priority=0), 3.0)
    scheduler.schedule(3.0)
    scheduler.remove_listener(film)
    film.close()
    assert preemptions(file.getvalue()) == ["calm is preempted: urgent is more urgent and takes its place"]


def test_the_cost_of_a_preemption_matches_the_events_until_it_resumes(short_pool: bytes) -> None:
    """The cost is the time until the request resumes, and the tokens that were not cached then, as in its life."""
    film = read(short_pool)
    for one in preemptions_of(film):
        assert one.event.request is not None
        after = [event for event in film.events(one.frame, None) if event.request == one.event.request]
        resumed = next(event for event in after if event.op is Op.ADMITTED)
        assert one.resumed_after == resumed.time - one.event.time > 0
        assert one.num_recomputed_tokens == one.event.fields["lost"] - resumed.fields["cached"] >= 0
        told = dict(life_of(film, one.event.request).moments)[resumed.time]
        assert told.endswith(f" {one.num_recomputed_tokens} tokens to recompute")
    assert any(one.num_recomputed_tokens for one in preemptions_of(film))


def test_lives_of_a_film_equal_the_life_of_each_request(short_pool: bytes) -> None:
    film = read(short_pool)
    for life in lives_of(film):
        assert (life.waited, life.ran) == (life_of(film, life.number).waited, life_of(film, life.number).ran)
        assert list(life.waited.values()) == sorted(life.waited.values(), reverse=True)


def test_running_and_waiting_times_add_up_to_a_requests_life(short_pool: bytes) -> None:
    """Running and waiting times, by reason, add up to the time from arrival to end."""
    film = read(short_pool)
    for number in range(3):
        life = life_of(film, number)
        assert life.ran + sum(life.waited.values()) == pytest.approx(life.moments[-1][0] - life.moments[0][0])
        assert life.moments[-1][1] == f"r{number} finishes: length (max_tokens), 20 tokens generated"
    assert "budget" in life_of(film, 2).waited
    assert not life_of(film, 0).waited


def test_waits_behind_the_queue_head_are_summed_by_what_the_head_lacks() -> None:
    data, _ = run([(8, 6), (8, 2), (8, 2)], max_num_seqs=1)
    last = life_of(read(data), 2)
    assert last.waited == {"behind others, sequence_limit": 3.0, "sequence_limit": 1.0}


def test_the_life_of_a_request_that_predates_the_film_has_its_waits() -> None:
    scheduler = Scheduler(SchedulerConfig(**{**CONFIG, "max_num_seqs": 1, "max_num_batched_tokens": 8}))
    for name in ("runs", "waits"):
        scheduler.add(Request(name, range(10), arrival_time=2.0, max_tokens=3), 2.0)
    now, file = 2.0, io.BytesIO()
    recorder = FilmRecorder(file)
    while scheduler.has_unfinished_requests():
        if now == 3.0:  # the first of two chunks of the prompt is computed
            scheduler.start_film(recorder)
        output = scheduler.schedule(now)
        now += 1.0
        scheduler.update(output, StepResult([7] * int(output.samples.sum())), now)
    scheduler.remove_listener(recorder)
    recorder.close()
    film = read(file.getvalue())
    assert [one.arrival for one in film.requests] == [-1.0, -1.0]
    assert life_of(film, 0).ran == 3.0 and not life_of(film, 0).waited
    assert life_of(film, 1).ran == 3.0 and sum(life_of(film, 1).waited.values()) == 3.0
    _, spans = timeline_of(film)
    assert [(span.kind, span.begin, span.end) for span in spans if span.number == 0] == [
        ("prefill", 0.0, 1.0),
        ("decode", 1.0, 3.0),
    ]


def test_a_film_recorder_cannot_be_used_a_second_time() -> None:
    scheduler, recorder = Scheduler(SchedulerConfig(**CONFIG)), FilmRecorder(io.BytesIO())
    with pytest.raises(InvalidTransition, match="has not been started"):
        recorder.close()
    scheduler.start_film(recorder)
    with pytest.raises(InvalidTransition, match="this FilmRecorder was already started"):
        scheduler.start_film(recorder)
    scheduler.remove_listener(recorder)
    recorder.close()
    with pytest.raises(InvalidTransition, match="is closed"):
        recorder.close()
    with pytest.raises(InvalidTransition, match="this FilmRecorder was already started"):
        scheduler.start_film(recorder)


def test_steps_done_in_one_call_are_shown_like_single_steps() -> None:
    """Each of several steps done in one call equals the same step done alone."""
    trace = [TraceRequest(0.25 * index, 40 + 9 * index, 30 + index) for index in range(12)]
    config = SchedulerConfig(num_blocks=60, block_size=4, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
    films = []
    for is_stepping in (False, True):
        file = io.BytesIO()
        recorder = FilmRecorder(file)
        step_time = LinearStepTime(per_step=6e-3, per_token=8e-5)
        simulate(OpenLoop(trace), config, step_time, films=[recorder], is_stepping=is_stepping)
        recorder.close()
        films.append(read(file.getvalue()))
    at_once, by_steps = films
    assert len(at_once.frames) < len(by_steps.frames) == at_once.num_steps
    for step in range(0, at_once.num_steps, 3):
        one = at_once.state_at(at_once.frame_of_step(step), step)
        other = by_steps.state_at(by_steps.frame_of_step(step))
        assert one.running == other.running and one.time == pytest.approx(other.time, abs=2e-6)
        for number in one.running:
            mine, theirs = one.requests[number], other.requests[number]
            assert mine.num_computed_tokens == theirs.num_computed_tokens
            assert mine.num_generated_tokens == theirs.num_generated_tokens
            assert mine.table == theirs.table


def test_a_film_read_without_blocks_has_all_other_state(short_pool: bytes) -> None:
    film = read(short_pool, with_blocks=False)
    assert not film.has_blocks
    state = film.state_at(5)
    assert state.is_cached is None and not state.requests[0].table
    assert state.requests[0].num_computed_tokens == read(short_pool).state_at(5).requests[0].num_computed_tokens


def test_a_simulation_can_be_filmed() -> None:
    """Several steps done in one call are one frame, and every step is in a frame."""
    trace = [TraceRequest(0.4 * index, 100, 60) for index in range(30)]
    config = SchedulerConfig(num_blocks=200, max_model_len=512, max_num_seqs=64, max_num_batched_tokens=128)
    file = io.BytesIO()
    recorder = FilmRecorder(file)
    outcome = simulate(OpenLoop(trace), config, LinearStepTime(per_step=6e-3, per_token=8e-5), films=[recorder])
    recorder.close()
    film = read(file.getvalue())
    assert film.num_steps == outcome.timelines[0].num_steps > 2 * len(film.frames)
    assert film.end == pytest.approx(outcome.seconds, abs=1e-5)
    finished = [event for event in film.events(0, None) if event.op is Op.FINISHED]
    assert [event.fields["generated"] for event in finished] == [60] * 30
    times = [event.time for event in film.events(0, None)]
    assert times == sorted(times)


def test_each_step_is_found_in_its_frame(short_pool: bytes) -> None:
    film = read(short_pool)
    assert [film.frame_of_step(frame.step_id) for frame in film.frames] == list(range(len(film.frames)))
    with pytest.raises(KeyError, match="no step 9999"):
        film.frame_of_step(9999)


# ------------------------------------------------------------------ refusals


def test_a_truncated_film_shows_its_complete_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.core.observe.film.EVENTS_IN_A_CHUNK", 16)
    data, _ = run([(14, 20), (10, 20), (6, 20)])
    whole = read(data)
    shown = 0
    for end in range(len(data) - 1, len(data) // 2, -37):
        try:
            film = read(data[:end])
        except FilmError as error:
            assert "cut off at once" in str(error)
            break
        shown += 1
        assert not film.is_complete and 0 < len(film.frames) <= len(whole.frames)
        last = len(film.frames) - 1
        assert film.frames == whole.frames[: last + 1]
        one, other = film.state_at(last), whole.state_at(last)
        assert one.running == other.running and one.waiting == other.waiting and one.batch == other.batch
    assert shown > 5


def header_with(data: bytes, **changes: Any) -> bytes:
    file = io.BytesIO(data)
    header = read_header(file)
    out = io.BytesIO()
    write_header(out, {**header, **changes})
    return out.getvalue() + file.read()


def test_a_film_of_another_format_version_is_refused(short_pool: bytes) -> None:
    with pytest.raises(FilmError, match="format version 7, and this library reads version 3"):
        read(header_with(short_pool, format_version=7))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a film"),
        (b'{"format":"pointsman-recording"}\n', "not a film"),
        (MAGIC, "header is broken"),
        (MAGIC + struct.pack("<I", 2) + b"[]", "header is broken"),
        (MAGIC + struct.pack("<I", 20) + b'{"format_version":3}', "lacks `config`"),
        (MAGIC + struct.pack("<I", 1 << 31), "header is broken"),
    ],
)
def test_files_that_are_not_films_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(FilmError, match=why):
        read(data)


def altered(data: bytes, kind: str, change: Any) -> bytes:
    """The film with changed data in its chunks of one kind."""
    file = io.BytesIO(data)
    header = read_header(file)
    out = io.BytesIO()
    write_header(out, header)
    for letter, chunk in read_chunks(file):
        write_chunk(out, letter, change(chunk) if letter == kind else chunk)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 0),
        ("num_blocks", 1.5),
        ("num_blocks", 10**12),
        ("num_blocks", "x"),
        ("num_reserved_blocks", 12),
        ("max_num_batched_tokens", None),
    ],
)
def test_an_invalid_header_is_refused(short_pool: bytes, name: str, value: object) -> None:
    config = read(short_pool).header["config"]
    with pytest.raises(FilmError, match=rf"{name} in the film's header is"):
        read(header_with(short_pool, config={**config, name: value}))


@pytest.mark.parametrize("names", [{}, None, {"ops": ["step"]}, []])
def test_a_header_without_names_is_refused(short_pool: bytes, names: object) -> None:
    with pytest.raises(FilmError, match=r"the film's header lacks"):
        read(header_with(short_pool, names=names))


@pytest.mark.parametrize("kind", ["R", "E", "B"])
@pytest.mark.parametrize("seed", range(short_or_long(40, 1000)))
def test_a_broken_film_raises_only_film_errors(short_pool: bytes, kind: str, seed: int) -> None:
    """A film with changed, removed or added bytes is refused with a sentence, or can be shown."""
    rng = np.random.default_rng(seed)

    def change(chunk: bytes) -> bytes:
        if not chunk:
            return chunk
        place = int(rng.integers(len(chunk)))
        return chunk[:place] + bytes([int(rng.integers(256))]) * int(rng.integers(3)) + chunk[place + 1 :]

    try:
        film = read(altered(short_pool, kind, change))
        teller = Teller(film)
        for frame in range(len(film.frames)):
            state = film.state_at(frame)
            teller.decided(frame)
            for number in [*state.waiting, *state.parked]:
                teller.why(state, number)
        for number in range(len(film.requests)):
            life_of(film, number)
        timeline_of(film)
    except FilmError as error:
        assert str(error)


def test_a_chunk_with_a_huge_declared_size_is_not_unpacked(short_pool: bytes) -> None:
    head = short_pool.index(b"R", len(MAGIC) + struct.unpack("<I", short_pool[len(MAGIC) : len(MAGIC) + 4])[0])
    bomb = short_pool[:head] + struct.pack("<cII", b"R", 10, 1 << 31) + bytes(10)
    with pytest.raises(FilmError, match="the film is broken"):
        read(bomb)
    packed = zlib.compress(bytes(1 << 20))
    longer = short_pool[:head] + struct.pack("<cII", b"R", len(packed), 100) + packed
    with pytest.raises(FilmError, match="broken"):
        read(longer)


def packed(kind: str, columns: dict[str, bytes], strings: bytes | None = None) -> bytes:
    """The data of a chunk; the numbers of its columns are given as bytes below 128."""
    parts = [(len(numbers), numbers) for numbers in (columns.get(name, b"") for name in COLUMNS[kind])]
    if strings is not None:
        parts.append((len(strings), strings))
    return b"".join(leb128(count) + numbers for count, numbers in parts)


def leb128(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def bomb(header: dict[str, Any], *chunks: tuple[str, bytes], copies: int = 1) -> bytes:
    out = io.BytesIO()
    write_header(out, header)
    for _ in range(copies):
        for letter, data in chunks:
            write_chunk(out, letter, data)
    return out.getvalue()


MANY = 1 << 24
KEY = {"key_time": b"\0"}
BOMBS: dict[str, tuple[list[tuple[str, bytes]], int, str]] = {
    "numbers": ([("R", packed("R", {})), ("E", packed("E", KEY | {"priority": bytes(2 * MANY - 1000)}, b"[]"))], 1,
                "column 'priority' has 33,553,432 numbers, and all columns of a chunk together at most 16,777,216"),
    "frames": ([("R", packed("R", {})), ("E", packed("E", KEY | dict.fromkeys(("time", "step_id"), bytes(MANY // 4))
                | {"op": b"\x12" * (MANY // 4)}, b"[]"))], 1, "more than 1,073,741,824 bytes of memory"),
    "requests": ([("R", packed("R", {})), ("E", packed("E", KEY | {"step_id": bytes(MANY // 8)}, b"[]")),
                  ("R", packed("R", dict.fromkeys(COLUMNS["R"], bytes(MANY // 6))))], 1,
                 "more than 1,073,741,824 bytes of memory"),
    "strings": ([("R", packed("R", {})), ("E", packed("E", KEY, b'["' + b"a" * (MANY + 1) + b'"]'))], 1,
                "16,777,221 bytes of strings, more than 16,777,216"),
    "blocks": ([("R", packed("R", {})), ("E", packed("E", KEY, b"[]")),
                ("B", packed("B", {"key_block": bytes(2 * MANY - 1000)}))], 1, "column 'key_block' has 33,553,432"),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_decompression_bombs_are_refused_with_little_memory(short_pool: bytes, what: str) -> None:
    chunks, copies, why = BOMBS[what]
    data = bomb(read_header(io.BytesIO(short_pool)), *chunks, copies=copies)
    assert len(data) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(FilmError, match=why):
            read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 30


def test_long_columns_are_decoded_in_parts_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.core.observe.film_format.NUMBERS_AT_ONCE", 7)
    chance = np.random.default_rng(3)
    for differences in (False, True):
        for bits in (3, 7, 15, 31, 60):
            values = chance.integers(-(1 << bits), 1 << bits, 100)
            stream = np.frombuffer(pack_numbers(values, differences), dtype=np.uint8)
            found = unpack_numbers(stream, (stream < 128).nonzero()[0], differences)
            assert found.tolist() == values.tolist()
            assert found.itemsize <= max(1, 2 * (bits + 1) // 8)


def test_ids_with_html_are_shown_as_text(tmp_path: Path) -> None:
    scheduler = Scheduler(SchedulerConfig(**CONFIG))
    file = io.BytesIO()
    film = FilmRecorder(file)
    scheduler.start_film(film)
    name = '<img src=x onerror="alert(1)">\u202e\n'
    scheduler.add(Request(name, range(5), arrival_time=0.0, max_tokens=1), 0.0)
    scheduler.schedule(0.0)
    scheduler.remove_listener(film)
    film.close()
    assert json.dumps(name) in json.dumps([one.request_id for one in read(file.getvalue()).requests])
