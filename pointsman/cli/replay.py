"""`pointsman replay`: replays a recording, and compares every decision."""

from __future__ import annotations

from io import BufferedReader
from typing import Annotated

import typer

from pointsman.cli.errors import EXIT_FAILED, EXIT_OK, CommandError
from pointsman.cli.film import check_is_recording
from pointsman.core import ReplayDifference
from pointsman.core import replay as core_replay
from pointsman.files import open_input, read_text_lines, represented


def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recording, as pointsman generate --record writes it.")],
) -> int:
    """Replay a recording and compare every decision.

    Exit code 0: no difference; 1: the first difference is printed; 2: the file is not a recording.
    """
    try:
        with BufferedReader(open_input(file)) as opened:
            check_is_recording(file, opened.peek(), takes_films=False)
            report = core_replay(read_text_lines(opened))
    except OSError as error:
        raise CommandError(f"cannot read the recording {file}: {error.strerror}") from None
    except ValueError as error:  # RecordingError, or a line that is not text
        raise CommandError(f"{file}: {error}") from None
    except ReplayDifference as difference:
        where = "a call outside steps" if difference.step_id is None else f"step {difference.step_id}"
        print(f"{file}, line {difference.line}: the replay differs at {where}, in {difference.field}")
        print(f"recorded: {represented(difference.recorded, 400)}")
        print(f"replayed: {represented(difference.replayed, 400)}")
        return EXIT_FAILED
    print(
        f"{report.num_steps} steps replayed ({report.num_calls} calls, {report.num_requests} requests, "
        f"{report.num_preemptions} preemptions): no difference"
        f"{' up to the last line, which was cut off' if report.is_cut else ''}"
    )
    return EXIT_OK
