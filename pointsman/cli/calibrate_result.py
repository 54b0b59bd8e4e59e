"""The result of `pointsman calibrate`: the saved profile, and what is printed about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pointsman.cli.errors import CommandError

if TYPE_CHECKING:
    from pointsman.sim.profile import Profile


def save_profile(profile: Profile, output: str | None) -> None:
    """Write the profile, if there is a path for it.

    Raises:
        CommandError: the file cannot be written.
    """
    if output is None:
        return
    try:
        profile.save(output)
    except OSError as error:
        raise CommandError(f"cannot write the profile {output}: {error.strerror}") from None


def print_json(values: dict[str, Any]) -> None:
    """Print a result as one line of JSON, after all that was written to stderr."""
    sys.stderr.flush()
    print(json.dumps(values), flush=True)


def print_result(
    profile: Profile, num_measured: int, seconds: float, tables: Iterable[Table], output: str | None
) -> None:
    """Print a result in words.

    Args:
        num_measured: number of requests, steps or runs of the log.
        seconds: duration of the fit.
        tables: errors and fitted numbers.
        output: path of the saved profile; None: it is not saved.
    """
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(
        f"fitted to {profile.num_train} of {num_measured} {profile.kind} of {profile.source} in {seconds:.0f} s; the "
        f"other {num_measured - profile.num_train} were held out",
        markup=False,
    )
    for table in tables:
        console.print(table)
        console.print()
    for note in profile.notes:
        console.print(f"note: {note}", markup=False)
    if output is not None:
        console.print(f"profile: {output}", markup=False)
