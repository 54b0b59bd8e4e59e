"""Configuration of the documentation site, which Sphinx builds from this folder (`make docs`).

Sphinx with MyST and Furo: the pages stay Markdown that GitHub shows; the search index is a script, so that search works
from a folder without a server; a broken link or an unresolved name is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from pointsman.version import __version__

project = "Pointsman"
release = version = __version__
html_title = "Pointsman"

extensions = [
    "sphinx.ext.autodoc",  # the API reference from the docstrings
    "myst_parser",  # pages in Markdown
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_search_scorer = str(Path(__file__).parent / "static" / "search_scorer.js")

nitpicky = True
nitpick_ignore_regex = [  # types in signatures; a build without a network has no inventories of other projects
    ("py:.*", r"(numpy|collections|pathlib|os|io|typing|concurrent|torch|transformers|asyncio|threading)\..*"),
    ("py:.*", r"pointsman\.(core|engine|traces)\.\w+.*\.\w+"),  # internal types
    ("py:class", r"(np\.|npt\.)?\w+|.*[\[\]|].*"),  # types that are imported for type checkers alone, and parts of them
]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
default_role = "code"
SECTIONS = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)


def read_sections(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn `Args:`, `Returns:` and `Raises:` of a docstring into fields.

    An attribute's docstring is read as a method's: napoleon takes the words before its first colon for a type.
    """
    what = "method" if what in ("attribute", "data", "property") else what
    lines[:] = GoogleDocstring(lines, SECTIONS, app, what, name, obj, options).lines()


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", read_sections)
