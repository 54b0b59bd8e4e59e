"""`pointsman policies`: lists the policies of each kind, with their parameters."""

from __future__ import annotations

import inspect
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.core import ConfigError
from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.policy.registry import KINDS, known

OPTION_OF = {
    "order": "--order",
    "victim": "--victim",
    "reserve": "--reserve",
    "limit": "--token-limit",
    "eviction": "--eviction",
}
"""The command-line option that sets a policy, by the policy's kind."""


def run_policies(kind: str | None, *, as_json: bool) -> int:
    """Print the policies of `kind`; None: the policies of all kinds.

    Raises:
        CommandError: there is no such kind, or an installed package's policy cannot be loaded.
    """
    if kind is not None and kind not in KINDS:
        raise CommandError(f"no kind of policy is called {kind!r}; choose one of {', '.join(KINDS)}")
    try:
        found = {each: known(each) for each in ([kind] if kind else KINDS)}
    except ConfigError as error:
        raise CommandError(str(error)) from None
    if as_json:
        print(
            json.dumps(
                {each: [_policy_as_json(*item) for item in policies.items()] for each, policies in found.items()}
            )
        )
        return EXIT_OK
    console = Console()
    for each, policies in found.items():
        console.print(_policy_table(each, policies))
    print("Write a policy as name, or name:key=value,key=value. docs/guides/choose_policies.md: when to use each.")
    return EXIT_OK


def _policy_table(kind: str, policies: dict[str, type[Policy]]) -> Table:
    table = Table(title=f"{OPTION_OF[kind]} POLICY", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for header in ("name", "what it does", "parameters"):
        table.add_column(header, overflow="fold", ratio=None if header == "name" else 1)
    for name, policy in policies.items():
        parameters = "\n".join(_parameter_text(each) for each in policy.parameters)
        table.add_row(name, _summary(policy), parameters)
    return table


def _summary(policy: type[Policy]) -> str:
    """The first paragraph of the policy's docstring, without markup."""
    text = (inspect.getdoc(policy) or "").split("\n\n")[0]
    return " ".join(text.split()).replace("`", "")


def _parameter_text(parameter: Parameter) -> str:
    return f"{parameter.name}={parameter.default}{_bounds_text(parameter)}" + (
        f": {parameter.doc}" if parameter.doc else ""
    )


def _bounds_text(parameter: Parameter) -> str:
    if parameter.choices:
        return f" ({' or '.join(str(choice) for choice in parameter.choices)})"
    if parameter.low is None:
        return ""
    if parameter.high is None or parameter.high >= 2**31 - 1:
        return f" (at least {parameter.low:g})"
    return f" ({parameter.low:g} to {parameter.high:g})"


def _policy_as_json(name: str, policy: type[Policy]) -> dict[str, Any]:
    return {
        "name": name,
        "version": policy.version,
        "summary": _summary(policy),
        "parameters": [each._asdict() for each in policy.parameters],
    }
