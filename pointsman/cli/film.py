"""`pointsman film`: makes a film from a recording, and prints its steps, its state at a step, or a request's life."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.cli.display import one_line
from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.cli.progress_bar import ProgressBar
from pointsman.core import ReplayDifference, replay
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.film_format import MAGIC, FilmError, Op
from pointsman.core.observe.side_file import SideFile
from pointsman.core.recording import kind_of_other_file
from pointsman.files import open_regular, read_text_lines
from pointsman.web.film import Film
from pointsman.web.story import Teller, life_of, lives_of, meaning_of, preemptions_of
from pointsman.web.words import counted

MAX_ROWS = 40
"""Maximum number of requests in a table."""
HEAD = 64
"""Number of bytes by which a file is recognised."""
MAX_REASONS = 3
"""Maximum number of reasons for waiting that a table lists for one request."""


def film(
    file: Annotated[str, typer.Argument(help="A recording to make a film from, or a film to print.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Film to write [default: beside the recording].")
    ] = None,
    blocks: Annotated[
        bool, typer.Option(help="Whether the film has the block tables, which are most of its size.")
    ] = True,
    step: Annotated[int | None, typer.Option(help="Print the decisions of this step, and the state at it.")] = None,
    request: Annotated[
        str | None,
        typer.Option(help="Print the life of this request, and why it waited; the ID that the client knows is enough."),
    ] = None,
    waits: Annotated[
        int | None, typer.Option(min=1, help="Number of the longest waits to print, each with its reasons.")
    ] = None,
    preemptions: Annotated[
        bool,
        typer.Option(
            "--preemptions", help="Print every preemption: its time, the preempted request, and why it was chosen."
        ),
    ] = False,
) -> int:
    """Make a film from a recording: a file of every decision, to look at step by step.

    A film contains no tokens of prompts. If the file is a film, the command prints its extent, one step (--step), one
    request's life (--request), the longest waits (--waits), or the preemptions (--preemptions).
    """
    path = Path(file)
    asked = {"--step": step, "--request": request, "--waits": waits, "--preemptions": preemptions or None}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise CommandError(f"{given[0]} and {given[1]} print different things; give one of them")
    if not is_film(path):
        made = path.with_suffix(".film") if out is None else Path(out)
        check_output_is_not_input(path, made)
        path = _make_film(path, made, blocks)
    elif out is not None:
        raise CommandError(f"{file} is a film already; --out applies only to a recording")
    found = read_film(path)
    with broken_films(path):
        if step is not None:
            _print_step(found, step)
        if request is not None:
            _print_life(found, request)
        if waits is not None:
            _print_waits(found, waits)
        if preemptions:
            _print_preemptions(found)
        if not given:
            _print_extent(path, found)
    if not found.num_steps and request is None:
        print("The run has no steps yet: nothing was scheduled when this was recorded.")
    if not found.is_complete:
        print("The film was cut off: later events are missing.")
    return EXIT_OK


def is_film(path: Path) -> bool:
    """Whether a file is a film; if not, the file may be a recording.

    Raises:
        CommandError: the file cannot be read.
    """
    try:
        with open_regular(path) as opened:  # the file is read again later
            return opened.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None


def check_is_recording(name: str | Path, head: bytes, *, takes_films: bool) -> None:
    """Refuse a file that is certainly no recording, by its first bytes.

    Args:
        takes_films: whether the command takes films too.

    Raises:
        CommandError: the file is a film, a page, or something else than a recording.
    """
    kind = kind_of_other_file(head)
    remedy = "a film or a recording" if takes_films else "the recording, as pointsman generate --record writes it"
    if kind == "a film":
        raise CommandError(f"{name} is a film, which cannot be replayed; give the recording that it was made from")
    if kind == "a page":
        raise CommandError(f"{name} is a page (HTML), neither a film nor a recording; give {remedy}")
    if kind:
        raise CommandError(f"{name} is {kind}: a recording begins with a line of JSON; give {remedy}")


@contextmanager
def broken_films(path: Path) -> Iterator[None]:
    """Context that raises CommandError if a film contradicts itself."""
    try:
        yield
    except FilmError as error:
        raise CommandError(f"{path}: {error}") from None


def read_film(path: Path) -> Film:
    """Read a film. Raises CommandError if the file is not a film that can be read."""
    with broken_films(path):
        return Film.read(path)


def check_output_is_not_input(source: Path, out: Path) -> None:
    """Check the output's path. Raises CommandError if the output would replace the input."""
    if out.exists() and out.samefile(source):
        if not is_film(source):
            with open_regular(source) as opened:
                check_is_recording(source, opened.read(HEAD), takes_films=True)
        raise CommandError(f"{out} is the input file; give --out another name")


def film_recording(recording: Path, file: BinaryIO, *, with_blocks: bool = True) -> FilmRecorder:
    """Replay a recording, and write its film. Returns the recorder, which knows the film's size.

    Raises:
        CommandError: the file is not a recording, or the replay decides differently.
    """
    recorder = FilmRecorder(SideFile(file, raises=True), with_blocks=with_blocks)
    try:
        megabytes = recording.stat().st_size / 1e6
        bar = ProgressBar(
            f"of {recording.name} replayed", math.ceil(megabytes), noun="MB", figure="{task.fields[now]:,.0f} lines"
        )
        with BufferedReader(open_regular(recording)) as opened, bar:
            check_is_recording(recording, opened.peek(), takes_films=True)
            replay(_lines_with_progress(opened, bar), lambda scheduler: scheduler.start_film(recorder))
        recorder.close()
    except (ReplayDifference, ValueError, OverflowError) as error:  # OverflowError: a number beyond 64 bits
        raise CommandError(f"{recording}: {error}") from None
    return recorder


def _lines_with_progress(opened: BinaryIO, bar: ProgressBar) -> Iterator[str]:
    num_characters = 0
    for num_lines, line in enumerate(read_text_lines(opened), start=1):
        yield line
        num_characters += len(line)
        bar.update(num_characters // 1_000_000, num_lines)


def _make_film(recording: Path, out: Path, with_blocks: bool) -> Path:
    """Write the film of a recording. The file has a temporary name until the film is complete, so that a failure keeps
    an older film."""
    part = out.with_name(out.name + ".part")
    try:
        with part.open("wb") as file:
            size = film_recording(recording, file, with_blocks=with_blocks).num_bytes
        part.replace(out)
    except OSError as error:
        raise CommandError(f"cannot write {out}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    print(f"{out}: {size['events']:,} bytes of decisions, {size['blocks']:,} of blocks")
    return out


def _print_extent(path: Path, found: Film) -> None:
    print(f"{path}: {counted(len(found.requests), 'request')}, {counted(found.num_steps, 'step')}, {found.end:,.1f} s")
    counts, evicted = Counter[Op](), 0
    for event in found.events(0, None):
        counts[event.op] += 1
        evicted += event.fields.get("evicted", 0)
    print(
        f"{counted(counts[Op.ADMITTED], 'admission')}, {counted(counts[Op.PREEMPTED], 'preemption')}, "
        f"{counted(evicted, 'evicted block')}, {counts[Op.FINISHED]:,} finished, {counts[Op.REFUSED]:,} refused"
    )
    if found.frames:
        first = found.frames[0].step_id
        print(f"Next: pointsman film {path} --waits 10, --preemptions, --step {first}, or --request ID")


def _print_step(found: Film, step: int) -> None:
    if not found.frames:
        raise CommandError("the film has no step: nothing was scheduled")
    try:
        frame = found.frame_of_step(step)
    except KeyError:
        last = found.frames[-1].step_id + found.frames[-1].num_steps - 1
        raise CommandError(f"the film has no step {step}; it has {found.frames[0].step_id} to {last}") from None
    teller, state, shown = Teller(found), found.state_at(frame, step), found.frames[frame]
    last = shown.step_id + shown.num_steps - 1
    several = f", of steps {shown.step_id} to {last} that were done at once" if shown.num_steps > 1 else ""
    print(f"step {step}{several}, at {state.time:.3f} s")
    if step == shown.step_id:
        for sentence in teller.decided(frame):
            print(f"  {one_line(sentence)}")
    tokens = {row.number: row.num_tokens for row in state.batch}
    table = Table(title=f"{len(state.running)} running", title_justify="left", box=None, padding=(0, 2, 0, 0))
    headers = ["request", "tokens in this step", "computed", "of which cached", "prompt", "generated"]
    for header in [*headers, "blocks"] if found.has_blocks else headers:
        table.add_column(header, justify="left" if header == "request" else "right", overflow="fold")
    for number in state.running[:MAX_ROWS]:
        one = state.requests[number]
        numbers = [
            tokens.get(number, 0), one.num_computed_tokens, one.num_cached_tokens, one.num_prompt_tokens,
            one.num_generated_tokens,
        ]  # fmt: skip
        numbers += [len(one.table)] if found.has_blocks else []
        table.add_row(Text(one_line(teller.name(number))), *(f"{count:,}" for count in numbers))
    console = Console(markup=False)
    console.print(table)
    _print_omitted_count(len(state.running))
    print(f"{len(state.waiting)} waiting, {len(state.parked)} parked")
    asked = [*state.skipped, *([] if state.blocker is None else [state.blocker])]
    others = [number for number in [*state.waiting, *state.parked] if number not in asked]
    for number in [*asked, *others][:MAX_ROWS]:
        print(f"  {one_line(teller.name(number))}: {one_line(teller.why(state, number))}")
    _print_omitted_count(len(state.waiting) + len(state.parked))
    if state.is_cached is not None:
        references = state.num_references()
        free = int((references == 0).sum()) - found.header["config"]["num_reserved_blocks"]
        cached = int((state.is_cached & (references == 0)).sum())
        print(f"blocks: {int((references > 0).sum()):,} in use, {free:,} free, {cached:,} of these with cached content")


def _print_omitted_count(count: int) -> None:
    if count > MAX_ROWS:
        print(f"  and {count - MAX_ROWS} more")


def _print_life(found: Film, request_id: str) -> None:
    """Print the life of the request with this id. If there is none, print all requests of the completion with this id:
    a server makes the ids of requests by appending to the completion's id."""
    ids = [one.request_id for one in found.requests]
    numbers = [number for number, each in enumerate(ids) if each == request_id]
    numbers = numbers or [number for number, each in enumerate(ids) if each.startswith(f"{request_id}-")]
    if not numbers:
        some = ", ".join(repr(one.request_id) for one in found.requests[:5])
        more = ", ..." if len(found.requests) > 5 else ""
        raise CommandError(f"the film has no request {request_id!r}; it has {len(found.requests)}: {some}{more}")
    for place, number in enumerate(numbers):
        if place:
            print()  # a later request with the same id, or another sample
        life = life_of(found, number)
        for time, sentence in life.moments:
            print(f"{time:10.3f} s  {one_line(sentence)}")
        print(f"ran {life.ran:.3f} s, waited {life.total_waited:.3f} s" + (":" if life.waited else ""))
        width = max(map(len, life.waited), default=0)
        for reason, seconds in life.waited.items():
            print(f"{seconds:10.3f} s  {_reason_text(reason):{width}}  {meaning_of(reason)}")


def _reason_text(reason: str) -> str:
    return reason.replace("_", " ")


def _print_waits(found: Film, limit: int) -> None:
    """Print the requests that waited longest, with the reasons that explain most of each wait's duration."""
    lives = sorted(lives_of(found), key=lambda life: -life.total_waited)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in ("request", "waited, s", "ran, s", "most of it for"):
        table.add_column(header, justify="right" if header.endswith(" s") else "left", overflow="fold")
    for life in lives[:limit]:
        if not life.waited:
            break
        parts = [f"{_reason_text(reason)} {seconds:.3f}" for reason, seconds in list(life.waited.items())[:MAX_REASONS]]
        name = Text(one_line(found.requests[life.number].request_id))
        table.add_row(name, f"{life.total_waited:.3f}", f"{life.ran:.3f}", "; ".join(parts))
    if not table.row_count:
        print("No request waited.")
        return
    Console(markup=False).print(table)
    for reason in dict.fromkeys(reason for life in lives[:limit] for reason in list(life.waited)[:MAX_REASONS]):
        print(f"{_reason_text(reason)}: {meaning_of(reason)}")
    print("Next: --request ID shows why each of them waited")


def _print_preemptions(found: Film) -> None:
    teller, all_of_them = Teller(found), preemptions_of(found)
    for one in all_of_them:
        step = f"step {found.frames[one.frame].step_id}" if one.frame < len(found.frames) else "after the last step"
        print(f"{one.event.time:10.3f} s  {step}  {one_line(teller.sentence(one.event) or '')}; {one.cost()}")
    recomputed = sum(one.num_recomputed_tokens or 0 for one in all_of_them)
    print(
        f"{counted(len(all_of_them), 'preemption')} in {counted(found.num_steps, 'step')}, "
        f"{counted(recomputed, 'token')} computed again"
    )
