"""The page of the sandbox, and its server on this machine.

GET /state   the state of the sandbox
POST /do     an action (`Sandbox.do`); returns the state, or "error": the reason why it is impossible
GET /compared   a page that shows the current run beside the run under the settings to compare with
"""

from __future__ import annotations

import json
from threading import Lock
from typing import Any

from pointsman.web.local import Ask, LocalServer, Refused
from pointsman.web.page import assemble
from pointsman.web.player import page_of
from pointsman.web.sandbox import Sandbox, SandboxError, choices


def sandbox_server(sandbox: Sandbox, *, title: str = "Sandbox", port: int = 0) -> LocalServer:
    """A server of the sandbox's page.

    Args:
        title: title of the page.
        port: port to listen on; 0: any free port.

    Raises:
        OSError: the port is in use.
        ConfigError: an installed package's policy cannot be loaded.
    """
    lock = Lock()  # each request has a thread of its own

    def state(_: Ask) -> dict[str, Any]:
        with lock:
            return sandbox.answer()

    def do(ask: Ask) -> dict[str, Any]:
        action = ask.json()
        if not isinstance(action, dict):
            raise Refused(400, f'the body is {action!r:.100}; it must be an object like {{"do": "step"}}')
        with lock:
            try:
                sandbox.do(action)
            except SandboxError as error:  # status 200, because browsers log HTTP errors
                return {"error": str(error)}
            return sandbox.answer()

    def compared(_: Ask) -> dict[str, Any]:
        with lock:
            before, now = sandbox.before(), sandbox.played
        if before is None:
            return {"error": "the comparison uses these settings already; change one first"}
        if not before.num_steps or not now.num_steps:
            return {"error": "no step has been scheduled yet; step, or run"}
        return {"page": page_of(before.film, "before", (now.film, "now"))}

    page = assemble("sandbox", title, data={"choices": json.dumps(choices()).encode()}, connects=True)
    return LocalServer(page, {("GET", "/state"): state, ("POST", "/do"): do, ("GET", "/compared"): compared}, port=port)
