"""The live film: its parts and its watchers."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.observe.film import FilmRecorder
from pointsman.web import live as module
from pointsman.web.film import Film
from pointsman.web.live import MAX_WATCHERS, LiveFilm, TooManyWatchers, read_records


class Host:
    """A scheduler, its time and its live film."""

    def __init__(self, cost: float = 0.0) -> None:
        self.scheduler = Scheduler(SchedulerConfig(num_blocks=64, max_model_len=256, max_num_seqs=4))
        self.now = self.cpu = 0.0
        self._cost = cost
        self.live = LiveFilm(self.scheduler, clock=lambda: self.now, cpu_clock=self._tick)

    def _tick(self) -> float:
        self.cpu += self._cost
        return self.cpu

    def add(self, name: str, max_tokens: int = 1000) -> None:
        self.scheduler.add(Request(name, range(20), arrival_time=self.now, max_tokens=max_tokens), self.now)

    def step(self, count: int = 1, seconds: float = 0.01) -> None:
        for _ in range(count):
            output = self.scheduler.schedule(self.now)
            self.now += seconds
            num_tokens = int(output.samples.sum())
            self.scheduler.update(output, StepResult(np.full(num_tokens, 7, dtype=np.int32)), self.now)


class Reader:
    """A watcher's received records."""

    def __init__(self) -> None:
        self.header = b""
        self.films: list[Film] = []
        self.state: dict[str, Any] = {}

    def read(self, data: bytes) -> Reader:
        for kind, content in read_records(data):
            if kind == "H":
                self.header = content
            elif kind == "S":
                self.state = json.loads(content)
            else:
                self.films.append(Film(io.BytesIO(self.header + content)))
        return self

    @property
    def steps(self) -> list[int]:
        return [frame.step_id for film in self.films for frame in film.frames]


def test_the_parts_of_a_live_film_contain_consecutive_steps() -> None:
    host, reader = Host(), Reader()
    host.add("a")
    reader.read(host.live.take_records("me"))
    for _ in range(10):
        host.step(12)
        reader.read(host.live.take_records("me"))
    host.add("b")
    host.step(12)
    reader.read(host.live.take_records("me"))
    assert reader.steps == list(range(132))
    assert [[one.request_id for one in film.requests] for film in reader.films] == [["a"]] * 10 + [["a", "b"]]
    assert reader.films[5].state_at(0).requests[0].num_generated_tokens == 60
    assert reader.state == {"interval": 0.1, "dropped": 0, "running": 2, "waiting": 0, "parked": 0}


def test_a_live_film_has_at_most_ten_parts_a_second() -> None:
    host, reader = Host(), Reader()
    host.add("a")
    for _ in range(300):
        reader.read(host.live.take_records("me"))
        host.step()
    assert 25 <= len(reader.films) <= 30


def test_a_live_film_has_fewer_parts_if_cutting_a_part_is_expensive() -> None:
    host, reader = Host(cost=0.02), Reader()
    host.add("a")
    for _ in range(3000):
        reader.read(host.live.take_records("me"))
        host.step()
    assert reader.state["interval"] == 2.0
    assert 14 <= len(reader.films) <= 16  # 30 s


def test_the_scheduler_is_not_filmed_without_watchers() -> None:
    host = Host()
    host.add("a")
    host.step(3)
    assert host.scheduler._listeners == ()
    host.live.take_records("me")
    host.live.take_records("you")
    assert [type(one) for one in host.scheduler._listeners] == [FilmRecorder]  # one recorder for both
    host.live.remove_watcher("me")
    assert len(host.scheduler._listeners) == host.live.num_watchers == 1
    host.live.remove_watcher("you")
    host.live.remove_watcher("you")
    assert host.scheduler._listeners == () and host.scheduler._kv.returned is None
    host.step(3)
    again = Reader().read(host.live.take_records("me"))
    host.step(12)
    assert again.read(host.live.take_records("me")).steps == list(range(6, 18))


def test_a_new_watcher_first_gets_the_newest_part() -> None:
    host, me, you = Host(), Reader(), Reader()
    host.add("a")
    me.read(host.live.take_records("me"))
    host.step(12)
    me.read(host.live.take_records("me"))
    you.read(host.live.take_records("you"))
    assert you.steps == me.steps == list(range(12))
    host.step(12)
    assert (
        you.read(host.live.take_records("you")).steps == me.read(host.live.take_records("me")).steps == list(range(24))
    )


def test_a_slow_watcher_loses_whole_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 4000)
    host, me, slow = Host(), Reader(), Reader()
    host.add("a")
    slow.read(host.live.take_records("slow"))
    for _ in range(30):
        me.read(host.live.take_records("me"))
        host.step(12)
    slow.read(host.live.take_records("slow"))
    assert me.state["dropped"] == 0
    assert 0 < slow.state["dropped"] == 360 - len(slow.steps)
    assert slow.steps == list(range(slow.state["dropped"], 360))


def test_the_size_of_a_part_that_no_watcher_fetches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PART", 2000)
    monkeypatch.setattr("pointsman.core.observe.film.EVENTS_IN_A_CHUNK", 64)
    host, reader = Host(), Reader()
    host.add("a")
    reader.read(host.live.take_records("me"))
    host.step(900)
    assert len(host.live._file.getvalue()) < 4000
    reader.read(host.live.take_records("me"))
    assert 0 < reader.state["dropped"] < 900
    assert reader.steps == list(range(reader.state["dropped"], 900))


def test_the_number_of_watchers_is_bounded() -> None:
    host = Host()
    for number in range(MAX_WATCHERS):
        host.live.take_records(number)
    with pytest.raises(TooManyWatchers, match="close one of them"):
        host.live.take_records("one more")
    host.live.remove_watcher(3)
    host.live.take_records("one more")


def test_the_state_is_sent_each_second_while_idle() -> None:
    host = Host()
    assert [kind for kind, _ in read_records(host.live.take_records("me"))] == ["H", "S"]
    host.now = 0.5
    assert host.live.take_records("me") == b""
    host.now = 1.0
    assert [kind for kind, _ in read_records(host.live.take_records("me"))] == ["S"]


def test_the_complete_records_of_a_truncated_stream_are_read() -> None:
    host = Host()
    stream = host.live.take_records("me")
    whole = list(read_records(stream))
    assert list(read_records(stream[:-1])) == whole[:-1]
