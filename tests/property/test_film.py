"""Films show the true state: requests, queue, reasons and blocks at random steps of random runs."""

from __future__ import annotations

import io
import json
import random
from itertools import count
from typing import Any

import numpy as np
import pytest

from pointsman.core import Scheduler, replay
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.film_format import Op
from pointsman.core.replay import _Replay
from pointsman.core.state.events import Listener, StepDecision, StepRun
from pointsman.core.step.assembly import Parts
from pointsman.web.film import Film, State
from pointsman.web.live import LiveFilm, read_records
from tests.forms import seeds, short_of, short_or_long

from .operations import drive
from .test_fast_forward import FOCUS, SELDOM
from .test_fast_forward import drive as drive_twins

SEEDS = seeds(2, 3)
NUM_FRAMES = short_or_long(8, 20)
FOCUS_OF_STEPS = ("swap", "priority", "prefill-first", "drafts", "static", "retention")
SHORT_FOCUS = ("few blocks", "evictions", "swap", "priority", "retention", "bypass")


class Witness(Listener):
    """Records the true state at every step, after the film."""

    wants_blocks = True

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_evictions = scheduler._parts.kv.num_evictions
        self.seen: list[dict[str, Any]] = []

    def on_step(self, step: StepDecision) -> None:
        assert step.output is not None
        tokens = zip(step.output.requests, step.output.num_scheduled_tokens.tolist(), strict=True)
        self._note(step.step_id, [(request.request_id, count) for request, count in tokens])

    def on_steps(self, run: StepRun) -> None:
        self._note(run.first_step_id, None)

    def _note(self, step_id: int, batch: list[tuple[str, int]] | None) -> None:
        parts: Parts = self._scheduler._parts
        pool = parts.kv.pool
        self.seen.append(
            {
                "step": step_id,
                "batch": batch,
                "running": [
                    (
                        one.request_id,
                        int(parts.batch.num_computed_tokens[one.row]),
                        one.num_output_tokens,
                        one.num_prompt_tokens,
                        one.num_preemptions,
                        parts.kv.table(parts.batch, one.row).tolist(),
                    )
                    for one in parts.batch.members.requests
                ],
                "waiting": sorted((one.request_id, one.status.value) for one in parts.table.queue),
                "asked": {
                    one.request_id: None if one._state.deferral is None else one._state.deferral.reason.value
                    for one in [*parts.table.skipped, parts.table.blocker]
                    if one is not None
                },
                "parked": {one.request_id: one.status.value for one in parts.table.parked.values()},
                "references": pool.num_references.copy(),
                "cached": sorted(pool.cached_free_blocks()),
                "evicted": parts.kv.num_evictions - self._num_evictions,
            }
        )


def shown(film: Film, frame: int, seen: dict[str, Any], step_id: int | None = None) -> dict[str, Any]:
    """The film's state, in the form of `Witness`."""
    state: State = film.state_at(frame, step_id)
    name = [one.request_id for one in film.requests]
    assert state.is_cached is not None
    references = state.num_references()
    steps = [event for event in film.events(0, frame + 1) if event.op in (Op.STEP, Op.STEPS)]
    is_within = step_id is not None and step_id < film.frames[frame].step_id + film.frames[frame].num_steps - 1
    return {
        "step": film.frames[frame].step_id if step_id is None else step_id,
        "batch": None if seen["batch"] is None else [(name[row.number], row.num_tokens) for row in state.batch],
        "running": [
            (
                name[number],
                (one := state.requests[number]).num_computed_tokens,
                one.num_generated_tokens,
                one.num_prompt_tokens,
                one.num_preemptions,
                one.table,
            )
            for number in state.running
        ],
        "waiting": sorted((name[number], state.requests[number].status) for number in state.waiting),
        "asked": {
            name[number]: state.requests[number].reason
            for number in [*state.skipped, state.blocker]
            if number is not None
        },
        "parked": {name[number]: state.requests[number].status for number in state.parked},
        "references": references,
        "cached": ((references == 0) & state.is_cached).nonzero()[0].tolist(),
        "evicted": seen["evicted"] if is_within else sum(event.fields["evicted"] for event in steps),
    }


class Filmed:
    """A scheduler that is filmed, and its witness."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._film = FilmRecorder(self._file)
        self.witness: Witness | None = None

    def watch(self, scheduler: Scheduler) -> None:
        """Start the film and the witness of a scheduler."""
        self.witness = Witness(scheduler)
        scheduler.start_film(self._film)
        scheduler.add_listener(self.witness)

    def finish(self) -> bytes:
        """End the film, and return it."""
        self._film.close()
        return self._file.getvalue()

    def check(self, seed: int, num_frames: int = NUM_FRAMES) -> None:
        """Compare some frames with the witness."""
        made = Film(io.BytesIO(self.finish()))
        assert self.witness is not None
        seen = self.witness.seen
        assert made.is_complete and len(made.frames) == len(seen)
        for frame in sorted(random.Random(seed).sample(range(len(seen)), min(len(seen), num_frames))):
            same(f"frame {frame}", seen[frame], shown(made, frame, seen[frame]))

    def check_within(self, seed: int, witness: Witness, num_steps: int = NUM_FRAMES) -> int:
        """Compare steps that `advance` did with another scheduler's single steps; returns the number of steps."""
        made = Film(io.BytesIO(self.finish()))
        seen = {one["step"]: one for one in witness.seen}
        within = [
            (index, step_id)
            for index, frame in enumerate(made.frames)
            if frame.num_steps > 1
            for step_id in range(frame.step_id, frame.step_id + frame.num_steps)
        ]
        for frame, step_id in sorted(random.Random(seed).sample(within, min(len(within), num_steps))):
            same(f"step {step_id}", seen[step_id], shown(made, frame, seen[step_id], step_id))
        return len(within)


def check_each(seed: int, overrides: dict[str, Any], **options: int) -> int:
    """Check a random run; returns the number of steps that `advance` did."""
    filmed, witnesses = Filmed(), list[Witness]()

    def witness(scheduler: Scheduler) -> None:
        witnesses.append(Witness(scheduler))
        scheduler.add_listener(witnesses[0])

    drive_twins(seed, overrides, filmed.watch, witness)
    return filmed.check_within(seed, witnesses[0], **options)


def same(where: str, seen: dict[str, Any], told: dict[str, Any]) -> None:
    for key, value in seen.items():
        equal = np.array_equal(value, told[key]) if key == "references" else value == told[key]
        assert equal, f"{where}: {key} was {value}, and the film says {told[key]}"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that most frames are found from a key frame in the middle."""
    monkeypatch.setattr("pointsman.core.observe.film.EVENTS_IN_A_CHUNK", 40)


def recorded(seed: int, overrides: dict[str, Any]) -> list[str]:
    file = io.StringIO()
    drive(seed, 60, recording=file, **overrides)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("focus", ["anything", *FOCUS_OF_STEPS])
def test_a_film_of_single_steps_shows_each_state(focus: str) -> None:
    for seed in SEEDS:
        filmed = Filmed()
        replay(recorded(7_000 + seed, FOCUS[focus]), filmed.watch)
        filmed.check(seed)


def test_a_film_that_begins_in_the_middle_of_a_run_shows_each_state() -> None:
    """A film that begins while requests run, wait, and are in flight."""
    for seed in seeds(4, 11):
        lines, filmed, run = recorded(7_500 + seed, {}), Filmed(), _Replay()
        begins = random.Random(seed).randrange(2, len(lines))
        for number, line in enumerate(lines, start=1):
            run._replay_line(json.loads(line), number)
            if number == begins:
                assert run._scheduler is not None
                filmed.watch(run._scheduler)
        filmed.check(seed)


def test_a_film_divided_between_any_two_calls_can_be_shown() -> None:
    """Cut between any two calls of the scheduler, also with steps in flight."""
    for seed in seeds(4, 11):
        choose, run = random.Random(seed), _Replay()
        live: LiveFilm | None = None
        stream = b""
        for number, line in enumerate(recorded(7_800 + seed, {}), start=1):
            run._replay_line(json.loads(line), number)
            if live is not None:
                if choose.random() < 0.2:
                    stream += live.take_records("me")
            elif run._scheduler is not None and choose.random() < 0.2:
                live = LiveFilm(run._scheduler, clock=count().__next__, cpu_clock=lambda: 0.0)
                stream += live.take_records("me")
                witness = Witness(run._scheduler)
                run._scheduler.add_listener(witness)
        assert live is not None
        stream += live.take_records("me")
        records = list(read_records(stream))
        assert records[0][0] == "H"
        films = [Film(io.BytesIO(records[0][1] + part)) for kind, part in records if kind == "P"]
        frames = [(film, index) for film in films for index in range(len(film.frames))]
        assert len(films) > 2 and len(frames) == len(witness.seen)
        for index in choose.sample(range(len(frames)), min(len(frames), 3 * NUM_FRAMES)):
            part, frame = frames[index]
            before = index - frame  # frames of earlier parts: this part lacks their evictions
            num_evicted = witness.seen[before - 1]["evicted"] if before else 0
            seen = {**witness.seen[index], "evicted": witness.seen[index]["evicted"] - num_evicted}
            same(f"frame {index}", seen, shown(part, frame, seen))


@pytest.mark.parametrize("focus", short_of(FOCUS, SHORT_FOCUS))
def test_a_film_of_fast_forward_shows_each_state(focus: str) -> None:
    for seed in SEEDS:
        filmed = Filmed()
        drive_twins(seed, FOCUS[focus], filmed.watch)
        filmed.check(seed)


@pytest.mark.parametrize("focus", short_of(FOCUS, ("few blocks", "evictions", "retention")))
def test_a_film_shows_each_step_of_fast_forward(focus: str) -> None:
    """One scheduler does in one `advance` the single steps of another: the film shows each of these steps."""
    count = sum(check_each(300 + seed, FOCUS[focus]) for seed in seeds(2, 4))
    assert count or focus in SELDOM


def test_a_film_shows_blocks_allocated_during_fast_forward() -> None:
    """A finished request left the block; it was shown as free with cached content until the step that took it."""
    assert check_each(310, FOCUS["growth"], num_steps=1000)


def test_a_film_frees_blocks_if_a_too_long_part_ends_the_request() -> None:
    """The next part of a prompt was too long; the film still showed the finished request's blocks as held."""
    filmed = Filmed()
    drive_twins(17, FOCUS["reuse"], filmed.watch)
    filmed.check(17, num_frames=1000)
