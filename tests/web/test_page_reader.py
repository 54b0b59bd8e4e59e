"""`film.js` reads films like `Film`, whose states tests/property/test_film.py compares with the scheduler."""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import replay
from pointsman.core.observe.film_format import COLUMNS, Op, read_header, write_header
from pointsman.web.film import Film, State
from pointsman.web.story import Teller, life_of
from pointsman.web.timeline import timeline_of
from pointsman.web.words import page_words
from tests.forms import seeds
from tests.property.test_fast_forward import FOCUS
from tests.property.test_fast_forward import drive as drive_twins
from tests.property.test_film import Filmed, recorded

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="the page's reader is tried with Node.js")

OF_MEMORY = ("watermark", "full_sequence", "decode_reserve", "reserve", "bypass", "blocks", "preemption")
READER = Path(__file__).with_name("read_film.js")
SEEDS = seeds(2, 7)
FOCUS_OF_RUNS = ("few blocks", "evictions", "priority", "retention")
FOCUS_OF_STEPS = ("anything", "swap", "drafts", "prefill-first")


def answers(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = "".join(json.dumps(question) + "\n" for question in questions)
    done = subprocess.run(
        ["node", str(READER), json.dumps(page_words())], input=asked, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def films(folder: Path, numbers: Iterable[int]) -> list[Path]:
    """Films of random runs, by single steps and by several steps in one call."""
    made = []
    for seed in (8_000 + number for number in numbers):
        for focus in (*FOCUS_OF_STEPS, *FOCUS_OF_RUNS):
            filmed = Filmed()
            if focus in FOCUS_OF_STEPS:
                replay(recorded(seed, FOCUS[focus]), filmed.watch)
            else:
                drive_twins(seed, FOCUS[focus], filmed.watch)
            made.append(folder / f"{focus}-{seed}.film")
            made[-1].write_bytes(filmed.finish())
    return made


def counts_at(film: Film, frame: int, step: int) -> dict[str, int]:
    """The totals after the decision of a step, from the events up to it."""
    events, timeline = list(film.events(0, frame + 1)), timeline_of(film)[0]
    names, begun = film.header["names"], film.frames[frame]
    steps = [event.fields for event in events if event.op in (Op.STEP, Op.STEPS)]
    lengths = [one.num_steps for one in film.frames[:frame]] + [step - begun.step_id + 1]
    blocked = [fields["blocked"] and names["reasons"][fields["blocked"] - 1] in OF_MEMORY for fields in steps]
    ends = [event.fields["reason"] for event in events if event.op is Op.FINISHED]
    refused = ends.count(names["finish_reasons"].index("refused"))
    left = int(timeline.num_running[frame]) * (begun.num_steps - lengths[-1])
    causes = [names["causes"][event.fields["cause"]] for event in events if event.op is Op.PREEMPTED]
    return {
        "steps": sum(lengths),
        "prefill": int(timeline.num_prefill_tokens[: frame + 1].sum()),
        "decode": int((timeline.num_decode_tokens * timeline.num_steps)[: frame + 1].sum()) - left,
        "cached": sum(event.fields["cached"] for event in events if event.op is Op.ADMITTED),
        "preempted": len(causes),
        "finished": len(ends) - refused,
        "evicted": sum(fields["evicted"] for fields in steps),
        "waited": sum(length for length, one in zip(lengths, blocked, strict=True) if one),
        "outOfMemory": causes.count("memory"),
        "refused": refused + sum(event.op is Op.REFUSED for event in events),
    }


def gained(film: Film, frame: int, state: State) -> dict[str, int]:
    """Number of requests in each state, minus the number when the film began."""
    gains, counts = Counter[str](), counts_at(film, frame, film.frames[frame].step_id)
    for found, sign in ((state, 1), (film.beginning(), -1)):
        for one in found.requests.values():
            gains["parked" if one.number in found.parked else one.status] += sign
    gains.update(finished=counts["finished"], refused=counts["refused"])
    places = ("waiting", "parked", "running", "preempted", "finished", "refused")
    return {"new": -sum(gains.values()), **{place: gains[place] for place in places}}


def longest_itl(film: Film) -> list[float]:
    """For each step: the longest time, among its requests, between its token and the previous token."""
    last: dict[int, float] = {}
    flight: list[tuple[int, list[tuple[int, bool]]]] = [
        (-1, [(row.number, row.samples) for row in rows]) for rows in film.beginning().in_flight
    ]
    found, index = [0.0] * film.num_steps, 0
    place = 0

    def came(number: int, time: float) -> float:
        before = last.get(number, time)
        last[number] = time
        return time - before

    for event in film.events(0, None):
        if event.op is Op.STEP:
            rows = [(row.number, row.samples) for row in film.state_at(index).batch]
            flight.append((place, rows))
        elif event.op is Op.UPDATE:
            whose, rows = flight.pop(0)
            counts = [int(samples) for _, samples in rows]
            for row, count in event.fields["rows"]:
                counts[row] = count
            gaps = [came(number, event.time) for (number, _), count in zip(rows, counts, strict=True) if count]
            if whose >= 0:
                found[whose] = max(gaps, default=0.0)
        elif event.op is Op.STEPS:
            time = event.time
            for step, micros in enumerate(event.fields["micros"]):
                time += micros / 1e6
                running = film.state_at(index, event.fields["id"] + step).running
                found[place + step] = max((came(number, time) for number in running), default=0.0)
        elif event.op is Op.FAILED:
            del flight[len(flight) - event.fields["steps"] :]
        elif event.op is Op.EXTENDED:
            assert event.request is not None
            last.pop(event.request, None)
        if event.op in (Op.STEP, Op.STEPS):
            place, index = place + film.frames[index].num_steps, index + 1
    return found


def before(film: Film, frame: int, step: int, most: int) -> list[list[Any]]:
    told = Teller(film)
    first = frame if step > film.frames[frame].step_id else frame - 1
    every = [[index, one] for index in range(first, -1, -1) for one in reversed(told.decided(index))]
    return every[:most]


def some_steps(film: Film, rng: random.Random) -> list[list[int | None]]:
    """Random [frame, step] pairs. If the frame has several steps, `step` is one of them, or None: after all of them."""
    runs = [index for index, frame in enumerate(film.frames) if frame.num_steps > 1]
    chosen: list[list[int | None]] = []
    for _ in range(min(12, len(film.frames))):
        index = rng.randrange(len(film.frames)) if not runs or rng.random() < 0.4 else rng.choice(runs)
        frame = film.frames[index]
        chosen.append([index, rng.choice((None, *range(frame.step_id, frame.step_id + frame.num_steps)))])
    return chosen


def expected(film: Film, frame: int, step: int | None) -> dict[str, Any]:
    state, teller = film.state_at(frame, step), Teller(film)
    references = state.num_references()
    assert state.is_cached is not None
    return {
        "time": state.time,
        "running": [
            [
                number,
                (one := state.requests[number]).num_computed_tokens,
                one.num_generated_tokens,
                one.num_prompt_tokens,
                one.num_cached_tokens,
                one.num_preemptions,
                one.table,
            ]
            for number in state.running
        ],
        "waiting": [[number, teller.why(state, number)] for number in state.waiting],
        "parked": [[number, teller.why(state, number)] for number in state.parked],
        "batch": [[row.number, row.num_tokens, row.samples, row.num_drafts] for row in state.batch],
        "references": references.tolist(),
        "cached": (state.is_cached & (references == 0)).nonzero()[0].tolist(),
        "decided": teller.decided(frame),
    }


def test_the_columns_in_film_js_match_the_format() -> None:
    text = (Path(__file__).parents[2] / "pointsman" / "web" / "page" / "film.js").read_text()
    for kind, columns in COLUMNS.items():
        listed = text.split(f"  {kind}: ")[1].split(",\n")[0].strip('"`').split()
        assert listed == [("+" if differences else "") + name for name, differences in columns.items()]


def test_film_js_gives_the_same_states_words_and_lives_as_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.core.observe.film.EVENTS_IN_A_CHUNK", 40)
    paths, questions = films(tmp_path, SEEDS), []
    for path in paths:
        film, rng = Film.read(path), random.Random(path.name)
        numbers = rng.sample(range(len(film.requests)), min(3, len(film.requests)))
        questions.append({"film": str(path), "steps": some_steps(film, rng), "requests": numbers})
    for question, answer in zip(questions, answers(questions), strict=True):
        film = Film.read(question["film"])
        assert "error" not in answer, answer
        assert answer["frames"] == [[one.step_id, one.num_steps, one.time] for one in film.frames]
        assert answer["end"] == pytest.approx(film.end)
        for (frame, step), state in zip(question["steps"], answer["states"], strict=True):
            for key, value in expected(film, frame, step).items():
                assert state[key] == value, (question["film"], frame, step, key)
            if step is not None:
                place = sum(one.num_steps for one in film.frames[:frame]) + step - film.frames[frame].step_id
                time = film.state_at(frame, step).time
                assert state["ways"][:4] == [place, {"frame": frame, "step": step}, frame, time]
                assert state["ways"][4] >= place  # larger, if the next steps took no time
                assert state["counts"] == counts_at(film, frame, step)
                assert state["places"] == gained(film, frame, film.state_at(frame, step))
                assert state["before"] == before(film, frame, step, 12)
        timeline = timeline_of(film)[0]
        config = film.header["config"]
        assert answer["curves"]["running"] == timeline.num_running.tolist()
        assert answer["curves"]["waiting"] == timeline.num_waiting.tolist()
        size = config["num_blocks"] - config["num_reserved_blocks"]
        assert answer["curves"]["used"] == pytest.approx(1 - timeline.num_free_blocks / size)
        if num_behind := sum(frame.chunk > 1 for frame in film.frames):  # frames after a missing chunk
            behind = [timeline.num_running[-num_behind:].tolist(), timeline.num_waiting[-num_behind:].tolist()]
            assert answer["behindGap"] == behind
        assert answer["notDrawn"] == []  # moves that the diagram of states lacks
        assert answer["itl"] == pytest.approx(longest_itl(film))
        for number, (moments, waited, ran) in zip(question["requests"], answer["lives"], strict=True):
            life = life_of(film, number)
            assert [(time, told) for time, told, _ in moments] == life.moments
            assert all(
                any(
                    told.startswith(one)  # for a request that resumes, the cost is appended
                    for one in (answer["after"] if at == len(film.frames) else Teller(film).decided(at))
                )
                for _, told, at in moments
            )
            assert waited == pytest.approx(life.waited) and ran == pytest.approx(life.ran)


def test_film_js_shows_the_complete_chunks_of_a_truncated_film(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.core.observe.film.EVENTS_IN_A_CHUNK", 40)
    path = films(tmp_path, [0])[0]
    num_frames, data = len(Film.read(path).frames), path.read_bytes()
    path.write_bytes(data[:-18])  # its end, and a byte
    film = Film.read(path)
    step = [len(film.frames) - 1, film.frames[-1].step_id]
    [answer] = answers([{"film": str(path), "steps": [step], "requests": []}])
    assert film.has_blocks and 0 < len(film.frames) < num_frames
    assert answer["frames"] == [[one.step_id, one.num_steps, one.time] for one in film.frames]
    assert answer["states"][0]["references"] == expected(film, step[0], step[1])["references"]


def test_files_that_are_not_films_are_refused_with_a_sentence(tmp_path: Path) -> None:
    good = Filmed()
    replay(recorded(8_001, {}), good.watch)
    data = good.finish()
    file = io.BytesIO(data)
    header = read_header(file)
    newer = io.BytesIO()
    write_header(newer, {**header, "format_version": 7})
    newer.write(file.read())
    broken = bytearray(data)
    for place in range(len(data) // 2, len(data), 97):
        broken[place] ^= 255
    cases = {
        "empty": b"", "text": b'{"format":"pointsman-recording"}\n', "cut": data[: len(data) // 3],
        "newer": newer.getvalue(), "broken": bytes(broken),
    }  # fmt: skip
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    asked = [{"film": str(tmp_path / name), "steps": [], "requests": []} for name in cases]
    for name, answer in zip(cases, answers(asked), strict=True):
        assert answer["error"].startswith("Error: "), (name, answer)
    assert "format version 7, and this page reads 3" in answers(asked)[list(cases).index("newer")]["error"]
