"""The page's reader says of a film what the library's says; tests/property/test_film.py holds that to the scheduler."""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import replay
from pointsman.core.observe.film_format import COLUMNS, read_header, write_header
from pointsman.web.film import Film
from pointsman.web.story import Teller, life_of
from tests.property.test_fast_forward import FOCUS
from tests.property.test_fast_forward import drive as drive_twins
from tests.property.test_film import Filmed, recorded
from tests.soak import short_or_long

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="the page's reader is tried with Node.js")

READER = Path(__file__).with_name("read_film.js")
NUM_SEEDS = short_or_long(2, 20)
FOCUS_OF_RUNS = ("few blocks", "evictions", "priority", "retention")
FOCUS_OF_STEPS = ("anything", "swap", "drafts", "prefill-first")


def answers(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = "".join(json.dumps(question) + "\n" for question in questions)
    done = subprocess.run(["node", str(READER)], input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def films(folder: Path) -> list[Path]:
    """Films of random runs, by steps and by steps at once."""
    made = []
    for seed in range(8_000, 8_000 + NUM_SEEDS):
        for focus in (*FOCUS_OF_STEPS, *FOCUS_OF_RUNS):
            filmed = Filmed()
            if focus in FOCUS_OF_STEPS:
                replay(recorded(seed, FOCUS[focus]), filmed.watch)
            else:
                drive_twins(seed, FOCUS[focus], filmed.watch)
            made.append(folder / f"{focus}-{seed}.film")
            made[-1].write_bytes(filmed.finish())
    return made


def some_steps(film: Film, rng: random.Random) -> list[list[int | None]]:
    """Back and forth: single steps, each of several that were done at once, and what was true when these were over."""
    runs = [index for index, frame in enumerate(film.frames) if frame.num_steps > 1]
    chosen: list[list[int | None]] = []
    for _ in range(min(8, len(film.frames))):
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


def test_the_columns_are_those_of_the_format() -> None:
    text = (Path(__file__).parents[2] / "pointsman" / "web" / "page" / "film.js").read_text()
    for kind, columns in COLUMNS.items():
        listed = text.split(f"  {kind}: ")[1].split(",\n")[0].strip('"`').split()
        assert listed == [("+" if differences else "") + name for name, differences in columns.items()]


def test_states_words_and_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.core.observe.film.EVENTS_IN_A_CHUNK", 40)
    paths, questions = films(tmp_path), []
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
                assert state["ways"][4] >= place  # later, if the next steps took no time
        for number, (moments, waited, ran) in zip(question["requests"], answer["lives"], strict=True):
            life = life_of(film, number)
            assert [(time, told) for time, told in moments] == life.moments
            assert waited == pytest.approx(life.waited) and ran == pytest.approx(life.ran)


def test_what_is_no_film_is_refused_with_a_sentence(tmp_path: Path) -> None:
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
    assert "format version 7, and this page reads 2" in answers(asked)[list(cases).index("newer")]["error"]
