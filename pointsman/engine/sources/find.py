"""Resolves the name of a model to a directory or a GGUF file on this machine. The module does not import PyTorch.

| name | meaning |
| --- | --- |
| nothing, `demo` | the packaged model |
| a directory that exists | the model in it: config.json and *.safetensors, or one GGUF model |
| a file that exists | a GGUF file, or one part of several |
| a name of `sources/named.py` | the installed named model |
| OWNER/NAME | a repository of the hub, downloaded if it is not cached |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pointsman.engine.errors import ModelLoadError
from pointsman.engine.gguf import PART_NAME, is_gguf
from pointsman.engine.sources.named import NAMED, installed_file
from pointsman.engine.text.tokenizer import model_directory
from pointsman.files import represented, shown

GGUF = ".gguf"
FORMS = "a directory with config.json and *.safetensors, a .gguf file, or a hub name OWNER/NAME"


def find_model(
    model: str | Path | None,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """The directory of a model in the Hugging Face format, or the model's GGUF file (its first part, if it has parts).

    Args:
        model: name or path of the model, see the table at the top of this module; "~" is the home directory.
        revision: branch, tag or commit of a hub repository; None: main.
        download_dir: cache folder for downloads from a hub; None: huggingface_hub's cache.
        check: function that is called before the weights are downloaded, with a directory that has all other files. Its
            exceptions end the search.

    Raises:
        ModelLoadError: the name has no valid form, the model does not exist, or it cannot be downloaded. The message is
            one line with the remedy.
    """
    text = "demo" if model is None else str(model)
    path = _existing_path(text)
    if path is None and not isinstance(model, Path) and not is_path(text):
        if text in NAMED:
            path = installed_file(text)
            if path is None:
                raise ModelLoadError(f"the model {text} is not installed; run: pointsman models get {text}")
        elif "/" in text:
            from pointsman.engine.sources.hub import download  # imports an HTTP client, only for hub names

            return download(text, revision=revision, download_dir=download_dir, check=check)
    for name, value in (("revision", revision), ("download_dir", download_dir)):
        if value is not None:
            raise ModelLoadError(
                f"{name} is {represented(str(value))}, and {shown(text)} is no hub name OWNER/NAME; leave {name} out"
            )
    if path is None:
        raise ModelLoadError(_not_found_message(text, looks_like_path=isinstance(model, Path) or is_path(text)))
    return _model_in_directory(path) if path.is_dir() else _first_part(path)


def _existing_path(text: str) -> Path | None:
    """The file or directory that a name denotes; None: it does not exist.

    Raises:
        ModelLoadError: the name is empty, or the system cannot look it up.
    """
    if not text.strip():
        raise ModelLoadError(f"the model's name is empty; give demo, {FORMS}")
    try:
        path = model_directory(text)
        path = path.expanduser() if text.startswith("~") else path
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, no permission, no home directory
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelLoadError(f"the model {represented(text)} cannot be looked up: {reason}; give {FORMS}") from None
    return path


def is_path(text: str) -> bool:
    """Whether a model's name is always treated as a path, never as a hub name."""
    return text.startswith(("/", ".", "~")) or text.count("/") > 1 or text.lower().endswith(GGUF)


def _not_found_message(text: str, *, looks_like_path: bool) -> str:
    name = shown(text, 200)
    if "://" in text:
        return (
            f"the model {name} is a URL; give a hub name as OWNER/NAME alone, or download the model and give its path"
        )
    if text.lower().endswith(GGUF):
        return f"no GGUF file at {name}; correct the path, or download the file first"
    if looks_like_path:
        return f"no model directory at {name}; give {FORMS}"
    known = ", ".join(("demo", *NAMED))
    if text.lower() in NAMED:
        return f"no model is called {name}; give {text.lower()}, in small letters"
    return f"no model is called {name}: there is no such directory, named models are {known}; a hub name is OWNER/NAME"


def _model_in_directory(path: Path) -> Path:
    """The first file of the GGUF model in a directory; the directory itself, if it has a config.json or no GGUF file.

    Raises:
        ModelLoadError: the directory has several GGUF models.
    """
    try:
        files = [] if (path / "config.json").exists() else sorted(path.glob(f"*{GGUF}"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}; correct its permissions") from None
    models: dict[str, Path] = {}
    for file in files:
        part = PART_NAME.fullmatch(file.name)
        models.setdefault(part["name"] if part else file.name, file)
    if len(models) > 1:
        names = shown(", ".join(file.name for file in models.values()), 200)
        raise ModelLoadError(f"{path} holds {len(models)} GGUF models ({names}); give one of these files")
    return _first_part(next(iter(models.values()))) if models else path


def _first_part(file: Path) -> Path:
    """The first part of the GGUF model to which a file belongs.

    Raises:
        ModelLoadError: the file's name does not end with .gguf, or the first part is missing.
    """
    if not is_gguf(file):
        raise ModelLoadError(
            f"{file} is no GGUF file; give a .gguf file, or the directory of a model in the Hugging Face format"
        )
    part = PART_NAME.fullmatch(file.name)
    if part is None:
        return file
    first = file.with_name(f"{part['name']}-{1:05}-of-{part['count']}{GGUF}")
    if not first.exists():
        raise ModelLoadError(f"{file} is part {int(part['number'])} of a model, and {first} is missing; download it")
    return first
