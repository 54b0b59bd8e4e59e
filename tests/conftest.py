"""Hypothesis profiles: a short form for every run, a long one with POINTSMAN_SOAK=1, and a count of executed rules."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.soak import SOAK, is_turn_of

# Started in the background of a script, the tests would hand a deaf ear for Ctrl-C down to all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

_common = settings(
    deadline=None,  # a shared machine is slow at times, and that is no failure
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    print_blob=True,
)
# The short form draws the same cases each time, so that a commit passes or fails by itself; the long one explores.
settings.register_profile("short", _common, max_examples=120, stateful_step_count=50, derandomize=True)
settings.register_profile("soak", _common, max_examples=400, stateful_step_count=60)
settings.load_profile("soak" if SOAK else "short")


LONG_ONES = ("test_docs.py", "test_policy_pictures.py", "integrations", "benchmarks", "server", "cli", "engine")
"""Files and folders with long tests, which come first: what is left at the end, when the workers of pytest-xdist take
from each other, is then in small pieces."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first; those of the long form alone are skipped in the short one, as are those whose turn it is not:
    in the short form where all tests are run, in the long one where those of a folder are."""
    here = Path(__file__).parent
    if not SOAK:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="the long form: make soak"))
    asked = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    if any(path.is_dir() if SOAK else path == here for path in asked):
        mark = "soak_in_turn" if SOAK else "in_turn"
        for item in items:
            if item.get_closest_marker(mark) and not is_turn_of(item.nodeid):
                item.add_marker(pytest.mark.skip(reason="it takes turns by commit; alone, it is run"))

    def place(item: pytest.Item) -> int:
        if "vllms_own" in item.name:  # in a worker that has imported vLLM already
            return LONG_ONES.index("integrations")
        names = (item.path.name, item.path.relative_to(here).parts[0])
        return min((LONG_ONES.index(name) for name in names if name in LONG_ONES), default=len(LONG_ONES))

    items.sort(key=place)


@pytest.fixture(scope="session")
def ray_python() -> Path:
    """The interpreter of an environment with Ray."""
    import ray_env

    if ray_env.make([]) != 0:
        pytest.skip("Ray cannot be installed here; python benchmarks/ray_env.py says why")
    return ray_env.python_of()


_rules: Counter[str] = Counter()  # executed by the workers of pytest-xdist


def _executed_rules() -> Counter[str]:
    """The rules that the property tests executed in this process, by name."""
    for name, module in sys.modules.items():
        if name.endswith("property.operations"):
            counts: Counter[str] = module.EXECUTED
            return counts
    return Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its count to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["executed_rules"] = dict(_executed_rules())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Collect the count of a worker that is done."""
    _rules.update(getattr(node, "workeroutput", {}).get("executed_rules", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many rules the property tests executed."""
    rules = _rules + _executed_rules()
    if rules:
        each = ", ".join(f"{name} {count}" for name, count in sorted(rules.items()))
        terminalreporter.write_line(f"property tests: {rules.total()} rules executed ({each})")
