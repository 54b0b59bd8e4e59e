"""Checks that our scheduler has every attribute and method that vLLM expects of a scheduler.

vLLM needs the abstract methods of its scheduler interface, and each attribute that its engine core, executors and
workers use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pointsman.integrations.vllm.interface.sources import Arguments, Class, Module, Signature, Sources
from pointsman.integrations.vllm.interface.uses import Assumption, override_problem

INTERFACE = ("vllm.v1.core.sched.interface", "SchedulerInterface")
PACKAGES_WITH_SCHEDULERS = ("vllm.v1.engine", "vllm.v1.executor", "vllm.v1.worker")
"""Packages of vLLM whose use of schedulers is checked. In these packages every variable named `scheduler` is a
scheduler."""


def scheduler_assumptions(sources: Sources, ours: Class) -> Iterator[Assumption]:
    """Yield vLLM's assumptions about a scheduler, each checked against our class."""
    yield from _check_methods(sources, ours)
    for package in PACKAGES_WITH_SCHEDULERS:
        for module in sources.modules_under(package, word="scheduler"):
            yield from _check_uses(module, ours)


def new_arguments(sources: Sources, ours: Class) -> Iterator[Assumption]:
    """Yield an assumption for each method of ours that does not accept the arguments with defaults that vLLM's
    interface declares."""
    for name, kind in _methods(sources):
        own, theirs = ours.member(name), kind.member(name)
        if own is None or own.function is None or theirs is None or theirs.function is None or name == "__init__":
            continue
        if override_problem(own.function, theirs.function, with_defaults=False) is None:
            problem = override_problem(own.function, theirs.function, with_defaults=True)
            if problem is not None:
                place = _file_and_line(kind.module.path, theirs.node)
                yield Assumption("scheduler", place, f"{ours.name}.{name}", True, problem)


def _methods(sources: Sources) -> Iterator[tuple[str, Class]]:
    module = sources.module(INTERFACE[0])
    kind = sources.find(module, INTERFACE[1]) if isinstance(module, Module) else None
    if isinstance(kind, Class):
        for name, member in kind.own_members.items():
            if member.is_abstract:
                yield name, kind


def _check_methods(sources: Sources, ours: Class) -> Iterator[Assumption]:
    """Yield an assumption for each abstract method of vLLM's interface, checked against our class."""
    found = False
    for name, kind in _methods(sources):
        found = True
        theirs, own = kind.own_members[name], ours.member(name)
        problem: str | None = None
        if own is None:
            problem = f"abstract in {kind.name}, which ours lacks"
        elif own.function is not None and theirs.function is not None and not theirs.is_property:
            if name == "__init__":  # vLLM passes all arguments by keyword
                names = frozenset(each.name for each in Signature.of(theirs.function.node, bound=True).parameters)
                problem = Signature.of(own.function.node, bound=True).call_problem(Arguments(0, names))
            else:
                problem = override_problem(own.function, theirs.function, with_defaults=False)
        place = _file_and_line(kind.module.path, theirs.node)
        yield Assumption("scheduler", place, f"{ours.name}.{name}", problem is None, problem or "")
    if not found:
        yield Assumption("scheduler", "", ".".join(INTERFACE), False, "it is not there, or has no abstract methods")


def _check_uses(module: Module, ours: Class) -> Iterator[Assumption]:
    """Check the attributes of a scheduler that a module of vLLM's reads or calls."""
    nodes = list(ast.walk(module.tree))
    asked = {name for node in nodes if isinstance(node, ast.Call) for name in _optional_attributes(node)}
    for node in nodes:
        place = _file_and_line(module.path, node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Attribute) and _is_scheduler(each) for each in targets):
                yield _check_call(place, ours.name, ours.constructor, Arguments.of(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_scheduler(node.func.value):
            member = ours.member(node.func.attr)
            if member is not None and member.function is not None and not member.is_property:
                signature = Signature.of(member.function.node, bound=True)
                yield _check_call(place, f"{ours.name}.{node.func.attr}", signature, Arguments.of(node))
        elif isinstance(node, ast.Attribute) and _is_scheduler(node.value) and node.attr not in asked:
            holds = ours.has_attribute(node.attr)
            found = "" if holds else f"vLLM reads scheduler.{node.attr}, which ours lacks"
            yield Assumption("scheduler", place, f"{ours.name}.{node.attr}", holds, found)


def _check_call(place: str, name: str, signature: Signature | None, given: Arguments) -> Assumption:
    """The assumption that our method `name` accepts the arguments that vLLM passes. `signature`: the method's
    signature; None: it is unknown, and the assumption counts as true."""
    problem = None if signature is None else signature.call_problem(given)
    found = f"ours {problem}, with {signature}" if problem else ""
    return Assumption("scheduler", place, f"{name}({given})", problem is None, found)


def _optional_attributes(node: ast.Call) -> Iterator[str]:
    """The attribute of a scheduler that a call of `hasattr`, or of `getattr` with a default, reads."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name == "hasattr" or (name == "getattr" and len(node.args) == 3):
        attribute = node.args[1]
        if _is_scheduler(node.args[0]) and isinstance(attribute, ast.Constant):
            yield str(attribute.value)


def _is_scheduler(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "scheduler"


def _file_and_line(path: Path, node: ast.AST) -> str:
    """Path and line of a node in a file of vLLM's; the path begins with the name of vLLM's package."""
    parts = path.parts
    start = len(parts) - 1 - parts[::-1].index("vllm")
    return f"{'/'.join(parts[start:])}:{getattr(node, 'lineno', 0)}"
