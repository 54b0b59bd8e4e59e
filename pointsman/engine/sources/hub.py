"""Downloads a model from a hub, with the library `huggingface_hub`, in four steps:

settings    download configuration, tokenizer and chat template, which are small
check       the caller refuses a model that cannot run, before gigabytes are downloaded
space       compare the size of the weights with the free space of the disk
weights     download the *.safetensors that the index names, or model.safetensors

Pickles, ONNX, GGUF, the weights of other frameworks and all folders of a repository are not downloaded, and neither are
files that are complete in the cache. Without a hub (HF_HUB_OFFLINE=1, or no response) a model that is complete in the
cache is used. huggingface_hub reads its environment variables (HF_TOKEN, HF_HOME, HF_ENDPOINT, ...) when it is
imported.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from pointsman.engine.errors import ModelLoadError, first_line
from pointsman.engine.text.tokenizer import TOKENIZER_FILES, VOCABULARY_FILES, read_json_object
from pointsman.files import represented, shown
from pointsman.version import __version__

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SETTINGS = (
    CONFIG,
    "generation_config.json",
    INDEX,
    *TOKENIZER_FILES,
    *VOCABULARY_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Names of the files that are downloaded before the weights, as patterns."""
FOLDERS = "*/*"
"""Pattern of files in a repository's folders. These files are not downloaded: they are in other formats, or in the
original authors' format."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
UNAUTHORIZED = 401
LIBRARY: dict[str, Any] = {"library_name": "pointsman", "library_version": __version__}
"""Name and version of this program, as arguments of huggingface_hub, which sends them to the hub."""


class _Hidden(tqdm):  # type: ignore[misc]
    """A progress bar that is not shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def download(
    name: str,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """The directory of a model in the cache; missing files are downloaded.

    Args:
        name: name of the repository, OWNER/NAME.
        revision: branch, tag or commit; None: main.
        download_dir: cache folder; None: huggingface_hub's cache.
        check: function that is called before the weights are downloaded, with a directory that has all other files. Its
            exceptions end the download.

    Raises:
        ModelLoadError: the model does not exist, cannot be downloaded, or is not in the Hugging Face format.
    """
    cache = Path(constants.HF_HUB_CACHE if download_dir is None else download_dir).expanduser()
    repository = _Repository(name, revision, cache)
    if constants.HF_HUB_OFFLINE:
        path = repository.cached_directory()
        if path is None:
            raise ModelLoadError(
                f"{repository} is not complete in {cache}, and HF_HUB_OFFLINE is set; unset it to download the model, "
                "or name a cache that has the model with --download-dir or HF_HOME"
            )
        return path
    try:
        sizes = repository.file_sizes()
    except ModelLoadError as error:
        path = repository.cached_directory()
        if path is None:
            raise
        logger.warning("using the cached files of %s: %s", repository, error)
        return path
    _check_format(name, sizes)
    path = repository.fetch_settings()
    missing = [one for one in _weight_files(path) if not (path / one).is_file()]
    if missing:
        if check is not None:
            check(path)
        absent = [one for one in missing if one not in sizes]
        if absent:
            raise ModelLoadError(
                f"{repository}: {INDEX} names {shown(absent[0])}, which the repository lacks; choose another revision"
            )
        num_bytes = sum(sizes[one] for one in missing)
        _check_space(name, cache, num_bytes)
        logger.info("downloading the weights of %s, %s, to %s", name, _size_text(num_bytes), cache)
        for one in missing:
            repository.fetch(one, commit=path.name)
    return path


@dataclass(frozen=True, slots=True)
class _Repository:
    """One revision of a hub repository, and the cache folder for its files."""

    name: str
    revision: str | None
    cache: Path

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name} (revision {shown(self.revision)})"

    def file_sizes(self) -> dict[str, int]:
        """Path of each file in the repository -> its size in bytes.

        Raises:
            ModelLoadError: the hub does not list the files.
        """
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        try:
            info = HfApi(**LIBRARY).model_info(self.name, revision=self.revision, files_metadata=True, timeout=timeout)
        except Exception as error:
            raise self._model_error(error) from error
        return {one.rfilename: one.size or 0 for one in info.siblings or ()}

    def fetch_settings(self) -> Path:
        """Download the files that match `SETTINGS`; returns the directory of the revision in the cache.

        Raises:
            ModelLoadError: a file cannot be downloaded or written.
        """
        try:
            return self._with_settings(is_local=False)
        except Exception as error:
            raise self._model_error(error) from error

    def fetch(self, file: str, commit: str) -> None:
        """Download a file in this thread, so that Ctrl-C stops the download; `snapshot_download` would complete the
        file first.

        Args:
            file: path of the file in the repository.
            commit: commit of the file. It replaces the revision, which may point to another commit by now.

        Raises:
            ModelLoadError: the file cannot be downloaded or written.
        """
        try:
            hf_hub_download(self.name, file, revision=commit, cache_dir=self.cache, **LIBRARY)
        except Exception as error:
            raise self._model_error(error) from error

    def cached_directory(self) -> Path | None:
        """The directory of the revision in the cache; None: the cache lacks a file.

        Raises:
            ModelLoadError: the name is no valid hub name.
        """
        try:
            path = self._with_settings(is_local=True)
            is_complete = all((path / one).is_file() for one in (CONFIG, *_weight_files(path)))
        except HFValidationError as error:
            raise self._model_error(error) from error
        except (LocalEntryNotFoundError, ModelLoadError):
            return None
        return path if is_complete else None

    def _with_settings(self, *, is_local: bool) -> Path:
        path = snapshot_download(
            self.name,
            revision=self.revision,
            cache_dir=self.cache,
            allow_patterns=list(SETTINGS),
            ignore_patterns=FOLDERS,
            local_files_only=is_local,
            tqdm_class=_Hidden,
            **LIBRARY,
        )
        return Path(path)

    def _model_error(self, error: Exception) -> ModelLoadError:
        """The `ModelLoadError` for an error of huggingface_hub: one line, with the remedy."""
        hub = constants.ENDPOINT
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        match error:
            case HFValidationError() if ":" in self.name:
                message = (
                    f"{represented(self.name)} has a tag, and a hub name is OWNER/NAME alone; give "
                    f"{shown(self.name.partition(':')[0])}, or download the GGUF file and give its path"
                )
            case HFValidationError():
                message = (
                    f"{represented(self.name)} is no hub name: OWNER/NAME has letters, digits, '-', '_' and '.'; "
                    "correct it, or give the path of a directory"
                )
            case GatedRepoError():
                message = (
                    f"{self.name} is gated: accept its licence at {hub}/{self.name}, and set HF_TOKEN to a token of "
                    "that account"
                )
            case RevisionNotFoundError():
                message = (
                    f"{self.name} has no revision {represented(self.revision)}; its branches, tags and commits are at "
                    f"{hub}/{self.name}/commits; leave --revision out to use main"
                )
            case RepositoryNotFoundError():
                message = (
                    f"there is no repository {self.name} at {hub}, and no directory of that name here; correct the "
                    "name, or set HF_TOKEN if the repository is private"
                )
            case HfHubHTTPError() if error.response.status_code == UNAUTHORIZED:
                message = f"{hub} refuses the token of HF_TOKEN; set it to a valid one, or unset it"
            case HfHubHTTPError():
                message = (
                    f"{hub} answered {error.response.status_code} for {self.name}: {first_line(error)}; try again later"
                )
            case OSError(strerror=str()):
                message = (
                    f"{self.name} cannot be written to {self.cache}: {error.strerror}; give another directory with "
                    "--download-dir or HF_HOME"
                )
            case OSError():
                message = f"{self.name} arrived incomplete: {first_line(error)}; run the command again"
            case _:  # the HTTP client's errors, which differ between versions of huggingface_hub
                message = (
                    f"the hub at {hub} cannot be reached for {self.name}: {first_line(error)}; check the network, "
                    "HTTPS_PROXY and HF_ENDPOINT, or give the path of a directory"
                )
        return ModelLoadError(message)


def _check_format(name: str, files: Iterable[str]) -> None:
    """Refuse a repository whose files are no model in the Hugging Face format.

    Raises:
        ModelLoadError: the repository has no configuration, or no safetensors.
    """
    files = sorted(files)
    gguf = [one for one in files if one.endswith(".gguf")]
    pickles = [one for one in files if one.endswith(PICKLES)]
    has_weights = WEIGHTS in files or INDEX in files
    if CONFIG in files and has_weights:
        return
    if gguf and not has_weights:
        raise ModelLoadError(
            f"{name} has GGUF files and no safetensors; download one (hf download {name} {shown(gguf[0])}) and give "
            "its path"
        )
    if "adapter_config.json" in files:
        raise ModelLoadError(
            f"{name} has only an adapter; merge it into its base model, and give the path of the result"
        )
    if CONFIG not in files:
        raise ModelLoadError(f"{name} has no {CONFIG}; choose a repository of a language model in safetensors")
    if pickles:
        raise ModelLoadError(
            f"{name} has its weights as pickles only ({shown(pickles[0])}), which can run code when they are read; "
            "choose a repository or a revision with safetensors"
        )
    raise ModelLoadError(f"{name} has no {WEIGHTS} and no {INDEX}; choose a repository with safetensors")


def _weight_files(path: Path) -> list[str]:
    """The names of a model's weight files: the files that the index names, or, without an index, `WEIGHTS`.

    Raises:
        ModelLoadError: the index cannot be read.
    """
    if not (path / INDEX).is_file():
        return [WEIGHTS]
    weight_map = read_json_object(path / INDEX).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, Mapping) else [None]
    if not all(isinstance(one, str) and one.endswith(".safetensors") for one in names):
        raise ModelLoadError(
            f"{path / INDEX}: weight_map must be an object that maps tensor names to *.safetensors files; "
            "choose another revision"
        )
    return sorted(set(names))


def _check_space(name: str, cache: Path, num_bytes: int) -> None:
    """Refuse a download that the disk cannot hold.

    Raises:
        ModelLoadError: the download is larger than the free space.
    """
    free = shutil.disk_usage(cache).free
    if num_bytes > free:
        raise ModelLoadError(
            f"{name} takes {_size_text(num_bytes)} and {cache} has {_size_text(free)} free; free disk space, or "
            "name a folder on another disk with --download-dir or HF_HOME"
        )


def _size_text(num_bytes: int) -> str:
    """A number of bytes as text, like 1.2 GB."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 10**3:,.1f} kB"
