"""Alternating servers: Pointsman's and vLLM's, on the same model directory, with the same settings.

Only one server has the machine at a time. The other one is stopped (SIGSTOP) with all its processes, as the engines of
`_worker_process.py` are. Both are started as a user starts them, with the knobs that limit concurrency; all others keep
their defaults.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import vllm_env
from _engine_model import CACHE, Shape, model_directory
from _server_client import HOST
from _server_probe import is_running
from _server_process import processor_seconds, start_server

DEMO_FILES = Path(__file__).resolve().parent.parent / "pointsman" / "engine" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY = 2048  # of the demo model's tokenizer
SMALL = Shape("9M", 256, 10, 4, 2, 64, 768, VOCABULARY)
LARGE = Shape("98M", 768, 14, 12, 4, 64, 2304, VOCABULARY)
SERVED_MODEL_NAME = "benchmark"
SECONDS_TO_START, SECONDS_TO_END = 300.0, 20.0


@dataclass(frozen=True, slots=True)
class Knobs:
    """Settings that both servers share."""

    model: Path
    threads: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_model_len: int = 1024
    block_size: int = 32  # vLLM's attention on a CPU takes multiples of 32
    kv_cache_gib: int = 1
    dtype: str = "float32"


class Side(ABC):
    """A running server. It runs from the start until `pause`."""

    name: str
    port: int

    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids of all its processes."""

    @abstractmethod
    def stop(self) -> None:
        """End all its processes."""

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.port

    def pause(self) -> None:
        """Stop all its processes until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all its processes."""
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far."""
        total = 0.0
        for pid in self.pids():
            with suppress(OSError):  # it has just ended
                total += processor_seconds(pid)
        return total

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class PointsmanSide(Side):
    """`pointsman serve`.

    Args:
        knobs: its settings.
        checkout: serve with the package in this folder; None: with the package that this process imports.

    Raises:
        RuntimeError: it did not start, or Python imports the package from elsewhere.
    """

    name = "pointsman"

    def __init__(self, knobs: Knobs, *, checkout: Path | None = None) -> None:
        options = {
            "--model": str(knobs.model),
            "--served-model-name": SERVED_MODEL_NAME,
            "--dtype": knobs.dtype,
            "--threads": str(knobs.threads),
            "--max-num-seqs": str(knobs.max_num_seqs),
            "--max-num-batched-tokens": str(knobs.max_num_batched_tokens),
            "--max-model-len": str(knobs.max_model_len),
            "--block-size": str(knobs.block_size),
            "--kv-cache-bytes": f"{knobs.kv_cache_gib}GiB",
        }
        environment = {} if checkout is None else _importing_from(checkout)
        self._server = start_server(*(word for pair in options.items() for word in pair), environment=environment)
        self.port = self._server.port
        self._pids = [self._server.engine_pid, self._server.pid]

    def pids(self) -> list[int]:
        return list(self._pids)

    def stop(self) -> None:
        self.resume()
        self._server.stop()


class VllmSide(Side):
    """vLLM's own API server.

    Args:
        knobs: its settings.
        eager: without compiling the model, which takes a minute.
        options: further options of its command line.
        folders: import paths with precedence, such as another version of vLLM.

    Raises:
        RuntimeError: it did not start; the message ends with its last output.
    """

    def __init__(self, knobs: Knobs, *, eager: bool, options: Sequence[str] = (), folders: Sequence[Path] = ()) -> None:
        self.name = "vllm-eager" if eager else "vllm"
        self.port = _free_port()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process lives
        command = [str(vllm_env.python_of()), "-m", "vllm.entrypoints.openai.api_server", "--host", HOST]
        command += ["--port", str(self.port), "--model", str(knobs.model), "--served-model-name", SERVED_MODEL_NAME]
        command += ["--dtype", knobs.dtype, "--max-num-seqs", str(knobs.max_num_seqs)]
        command += ["--max-num-batched-tokens", str(knobs.max_num_batched_tokens)]
        command += ["--max-model-len", str(knobs.max_model_len), "--block-size", str(knobs.block_size)]
        if eager:
            command.append("--enforce-eager")
        command += options
        environment = {
            **{name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"},
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(knobs.threads),
            "VLLM_CPU_KVCACHE_SPACE": str(knobs.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{knobs.threads - 1}" if knobs.threads > 1 else "0",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, [*folders, Path(__file__).resolve().parents[1]])),  # ours
        }
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        self._wait_until_healthy()

    def pids(self) -> list[int]:
        group = str(self._process.pid)
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[2] == group:
                    found.append(int(stat.parent.name))
        return found

    def stop(self) -> None:
        self.resume()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _wait_until_healthy(self) -> None:
        limit = time.monotonic() + SECONDS_TO_START
        while is_running(self._process.pid) and time.monotonic() < limit:
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        self._log.seek(0)
        words = self._log.read()[-4000:]
        self.stop()
        raise RuntimeError(f"{self.name} did not start within {SECONDS_TO_START:.0f} s:\n{words}")


def served_directory(shape: Shape) -> Path:
    """A model of random weights with the demo model's tokenizer, written first if it is not there.

    The shape's vocabulary is that of the tokenizer, so that every sampled token has a text.
    """
    weights = model_directory(shape)
    directory = CACHE / f"{weights.name}-text"
    if directory.is_dir():
        return directory
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="writing-") as temporary:
        made = Path(temporary) / "model"
        shutil.copytree(weights, made)
        for name in TOKENIZER_FILES:
            shutil.copy(DEMO_FILES / name, made)
        with suppress(OSError):  # another process was faster; what it wrote is the same
            os.replace(made, directory)
    return directory


def _importing_from(checkout: Path) -> dict[str, str]:
    """Variables with which this interpreter imports the package from a checkout, in the server's processes too.

    Hashes of strings are fixed, because their order in tables, and with it the cost, would differ between processes.

    Raises:
        RuntimeError: the interpreter imports the package from elsewhere.
    """
    variables = {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", "import pointsman; print(pointsman.__file__)"]
    found = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if Path(found.stdout.strip()) != checkout.resolve() / "pointsman" / "__init__.py":
        where = found.stdout.strip() or found.stderr.strip().splitlines()[-1]
        raise RuntimeError(f"{checkout} has no pointsman to import ({where}); give the root of a checkout")
    return variables


def write_vllm_metadata(folder: Path, version: str = vllm_env.VLLM_VERSION) -> Path:
    """Make a folder for PYTHONPATH with which vLLM's command line starts if only its CPU package is installed.

    vLLM reads the version of the distribution "vllm", and recognises a CPU build by "+cpu"."""
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])
