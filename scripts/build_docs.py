"""Build the documentation site: the pages of docs/, the course, and the film of a run.

    python scripts/build_docs.py FOLDER

A warning is an error: a broken link, a page outside the navigation, a name in the API reference that does not exist.
The site works from its folder, without a server and without a network.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
RUN = (
    *("simulate", "--device", "rtx-4090", "--requests", "300", "--output-tokens", "lognormal:300,0.8"),
    *("--num-blocks", "1200"),
)
"""The run whose film the site has."""


def build(folder: Path) -> int:
    """Build the site; returns an exit code."""
    sphinx = (sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", str(DOCS), str(folder))
    if (code := subprocess.run(sphinx).returncode) != 0:
        return code
    film = folder / "run.film"
    for arguments in (
        ("learn", "--out", str(folder / "course.html")),
        (*RUN, "--film", str(film)),
        ("play", str(film), "--out", str(folder / "film.html")),
    ):
        run = subprocess.run((sys.executable, "-m", "pointsman", *arguments), stdout=subprocess.DEVNULL)
        if run.returncode != 0:
            return run.returncode
    film.unlink()
    print(f"the site is {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(build(Path(sys.argv[1])))
