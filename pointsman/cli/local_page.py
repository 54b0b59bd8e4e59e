"""Serves a page on this machine until Ctrl-C; for `sandbox` and `live`."""

from __future__ import annotations

import webbrowser

from pointsman.cli.errors import EXIT_OK
from pointsman.web.local import LocalServer


def serve_page(server: LocalServer, *, open_page: bool) -> int:
    """Serve the page until Ctrl-C; returns the exit code."""
    print(f"{server.url}\nOpen it in a browser on this machine; Ctrl-C ends it.", flush=True)
    if open_page:
        webbrowser.open(server.url)
    try:
        server.serve()
    except KeyboardInterrupt:
        print()
    return EXIT_OK
