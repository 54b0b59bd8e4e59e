"""Configures test runs: options, hypothesis profiles, shards, progress of long tests, and commands to repeat failures.

`tests/forms.py` describes the short and the long form.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import forms

# In the background of a script, SIGINT is ignored, and all child processes of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The user's installed models have no influence, except on tests of real weights (tests/engine/real/weights.py).
os.environ.setdefault("POINTSMAN_TEST_MODELS", os.environ.get("POINTSMAN_MODELS", ""))
os.environ["POINTSMAN_MODELS"] = str(Path(__file__).parent / "no-models")

# Triton runs kernels on the CPU here. The variable must be set at its import, and started processes do not need it.
if find_spec("triton") is not None and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]

_common = settings(
    deadline=None,  # a shared machine is slow at times; that is no failure
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    print_blob=True,
    database=None,  # earlier runs have no influence
)
# The short form draws the same cases each time; the long form draws cases by date.
settings.register_profile("short", _common, max_examples=120, stateful_step_count=50, derandomize=True)
settings.register_profile("long", _common, max_examples=400, stateful_step_count=60)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("forms of the tests (tests/forms.py)")
    group.addoption("--long", action="store_true", help="run every test in its long form, as make test-all does")
    group.addoption("--shard", metavar="K/N", help="run part K of N of the tests, such as 1/4")
    group.addoption(
        "--explore",
        type=int,
        metavar="NUMBER",
        help="random seeds of the long form; by default those of today's date (UTC), such as 20261127",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.explore is None:  # the workers of pytest-xdist get the options of the process that starts them
        option.explore = int(datetime.now(UTC).strftime("%Y%m%d"))
    if option.shard is not None:
        try:
            forms.Shard.parse(option.shard)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    settings.load_profile("long" if option.long else "short")
    if option.long and option.hypothesis_seed is None:
        option.hypothesis_seed = str(option.explore)
    if option.long and option.timeout is None:
        option.timeout = LONG_TIMEOUT
    if hasattr(config, "workerinput"):
        folder = config.workerinput["progress"]
    else:
        reporter = Reporter(config)
        config.pluginmanager.register(reporter, "pointsman-reporter")
        folder = reporter.folder.name
    form = forms.Form(is_long=option.long, explore=option.explore)
    forms.choose(form, _Progress(Path(folder)).report)


# ---------------------------------------------------------------------- which tests, in which order

LONG_ONES = ("test_docs.py", "test_policy_pictures.py", "integrations", "benchmarks", "server", "cli", "engine")
"""Files and folders with long tests, which run first, so that the workers of pytest-xdist share small tests at the
end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that only the long form has; put long tests first; keep only the tests of the shard."""
    if not forms.is_long():
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="the long form: make test-all, or pytest --long"))
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        if "vllms_own" in item.name:  # in a worker that has imported vLLM already
            return LONG_ONES.index("integrations")
        folders = item.path.relative_to(here).parts if here in item.path.parents else ()
        names = (item.path.name, *folders[:1])
        return min((LONG_ONES.index(name) for name in names if name in LONG_ONES), default=len(LONG_ONES))

    items.sort(key=place)
    if config.option.shard is not None:
        kept = forms.Shard.parse(config.option.shard).of(items)
        others = set(items).difference(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = kept


@pytest.fixture(scope="session")
def ray_python() -> Path:
    """The interpreter of an environment with Ray."""
    import ray_env

    if ray_env.make([]) != 0:
        pytest.skip("Ray cannot be installed here; python benchmarks/ray_env.py says why")
    return ray_env.python_of()


def pytest_runtest_teardown() -> None:
    """Reset the package's log level, which a command inside the test's process may have changed."""
    logging.getLogger("pointsman").setLevel(logging.NOTSET)


# ---------------------------------------------------------------------- what is reported

SECONDS_BETWEEN_SIGNS = 60.0
LONG_TIMEOUT = 7200.0
"""Seconds after which a test in its long form counts as hanging."""


class _Progress:
    """Writes the progress of this process's test to a file that the reporting process reads."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / str(os.getpid())

    def report(self, text: str) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        with suppress(OSError):  # the reporting process may have ended
            self._file.write_text(f"{test}\n{text}")


class Reporter:
    """Prints the progress of tests that run for a minute, and for each failure the command that repeats it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.folder = tempfile.TemporaryDirectory(prefix="pointsman-tests-")
        self._running: dict[str, float] = {}
        self._done = threading.Event()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist where to report its progress."""
        node.workerinput["progress"] = self.folder.name

    def pytest_sessionstart(self) -> None:
        if not self._config.option.collectonly:
            threading.Thread(target=self._watch, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def _watch(self) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        while not self._done.wait(SECONDS_BETWEEN_SIGNS):
            told: dict[str, str] = {}
            with suppress(OSError):  # the session may end meanwhile
                told.update(file.read_text().partition("\n")[::2] for file in Path(self.folder.name).iterdir())
            for test, since in list(self._running.items()):
                seconds = time.monotonic() - since
                if terminal is not None and seconds > SECONDS_BETWEEN_SIGNS:
                    how_far = f", {told[test]}" if test in told else ""
                    terminal.write_line(f"\n{test}: running for {seconds:.0f} s{how_far}")

    def pytest_sessionfinish(self) -> None:
        self._done.set()
        self.folder.cleanup()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        option = self._config.option
        rules = _rules + _executed_rules()
        if rules:
            each = ", ".join(f"{name} {count}" for name, count in sorted(rules.items()))
            terminalreporter.write_line(f"property tests: {rules.total()} rules executed ({each})")
        if option.long:
            shard = f", shard {option.shard}" if option.shard else ""
            terminalreporter.write_line(f"long form{shard}; random seeds of {option.explore}")
        failed = [report for kind in ("failed", "error") for report in terminalreporter.getreports(kind)]
        if failed:
            terminalreporter.section("to repeat a failure alone")
        for report in {report.nodeid: report for report in failed}.values():
            long = ["--long", "--explore", str(option.explore)] if option.long else []
            terminalreporter.write_line(shlex.join(["python", "-m", "pytest", *long, report.nodeid]))
            for name, value in getattr(report, "user_properties", ()):
                if name == "seed":
                    terminalreporter.write_line(f"    its seed: {value}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the seed of a failure to its report: the local variable `seed` of the outermost function that has one. A
    function that tries a `run` of seeds in one process reports only their range."""
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        for entry in call.excinfo.traceback:
            names = entry.frame.f_locals
            if isinstance(seed := names.get("seed"), int):
                item.user_properties.append(("seed", str(seed)))
                break
            if isinstance(run := names.get("run"), range):
                item.user_properties.append(("seed", f"one of {run.start} to {run.stop - 1}"))
                break
    return (yield)


_rules: Counter[str] = Counter()  # executed by the workers of pytest-xdist


def _executed_rules() -> Counter[str]:
    """The rules that the property tests executed in this process, by name."""
    for name, module in sys.modules.items():
        if name.endswith("property.operations"):
            counts: Counter[str] = module.EXECUTED
            return counts
    return Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist: send the counts of executed rules to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["executed_rules"] = dict(_executed_rules())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add the counts of executed rules of a worker that has finished."""
    _rules.update(getattr(node, "workeroutput", {}).get("executed_rules", {}))
