"""Checks the engine on a GPU, in parts; see `docs/compatibility.md`, "GPUs".

Exit codes: 0, every part passed; 1, a part failed, was killed at its limit, or was not run for lack of time; 2, an
option is wrong, or there is no such device. Missed goals are reported and do not change the exit code.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any

from _common import note

from gpu_check.report import Report, result_line
from gpu_check.running import PARTS, Options, Part, run_parts

SECONDS = 525.0
"""Limit of all parts together: 9 minutes without the start and the end."""
TIMES_ON_CPU = 2
"""Factor of a part's limit on a CPU."""

ABOUT_GPU = """
import json, torch
found = {}
if torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    found |= {"device": "cuda", "name": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}
    found |= {"memory_gib": round(total / 2**30, 1), "free_gib": round(free / 2**30, 1)}
print(json.dumps(found))
"""


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the check.

    Args:
        arguments: command line arguments; None: this process's.
        parts: all parts.

    Returns:
        The exit code.
    """
    parser = make_parser(parts)
    given = parser.parse_args(arguments)
    chosen = [part for part in parts if given.only is None or part.letter in given.only]
    begun = monotonic()
    about = describe(given.device)
    if about.get("device") != given.device:
        print(f"--device is {given.device}, and PyTorch finds no GPU; --device cpu --tiny tries the check on a CPU")
        return 2
    note(", ".join(f"{name} {value}" for name, value in about.items()))
    report = Report(about | {"tiny": given.tiny}, [part.letter for part in chosen], given.out)
    report.write()

    def ends(result: Any) -> None:
        report.add(result)
        note(result_line(result))

    if given.device == "cpu":  # kernels are compiled, on a machine with fewer cores
        chosen = [replace(part, seconds=TIMES_ON_CPU * part.seconds) for part in chosen]
    run_parts(
        chosen,
        Options(given.device, given.tiny),
        given.seconds,
        begins=lambda part: note(f"{part.letter} {part.name}: {part.title}, at most {part.seconds:g} s"),
        ends=ends,
    )
    report.about["seconds"] = round(monotonic() - begun, 1)
    report.write()
    report.show()
    return 1 if report.failed else 0


def make_parser(parts: Sequence[Part]) -> argparse.ArgumentParser:
    """The parser of the options."""
    listed = ", ".join(f"{part.letter} {part.name}" for part in parts)

    def letters(text: str) -> list[str]:
        known = {name: part.letter for part in parts for name in (part.letter, part.name)}
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no part {name!r}; choose from {listed}")
        return [known[name] for name in names]

    def seconds(text: str) -> float:
        value = float(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not a time; give a number of seconds above 0")
        return value

    def file(text: str) -> Path:
        path = Path(text)
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; create it or name another file")
        return path

    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="a CPU is for trying the check itself"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that a CPU computes in seconds; goals are not judged"
    )
    parser.add_argument("--only", type=letters, metavar="PARTS", help=f"some of the parts, like a,b: {listed}")
    parser.add_argument("--out", type=file, metavar="FILE", help="JSON file, rewritten after each part")
    parser.add_argument("--seconds", type=seconds, default=SECONDS, help="limit of all parts [default: %(default)g]")
    return parser


def describe(device: str) -> dict[str, Any]:
    """The machine and its libraries. Another process queries the GPU, so that this one does not use the device.

    Raises:
        RuntimeError: PyTorch cannot be imported.
    """
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if device == "cpu":
        return found | {"device": "cpu", "name": platform.processor() or platform.machine()}
    asked = subprocess.run([sys.executable, "-c", ABOUT_GPU], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise RuntimeError(f"PyTorch must be installed for --device {device}:\n{asked.stderr}")
    return found | json.loads(asked.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
