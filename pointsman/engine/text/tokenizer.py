"""From text to token ids, and chat templates. Nothing here needs PyTorch: an API process uses it without a model.

An error that a tokenizer or a template raises on a text becomes a `ValueError` of one line.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pointsman.engine.errors import ModelLoadError, first_line
from pointsman.engine.gguf import is_gguf
from pointsman.files import MAX_SETTINGS, open_regular, read_regular, represented

logger = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).parents[1] / "demo"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", TOKENIZER_CONFIG)
MODEL_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken", ".py"})
VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenization_*.py")
"""Patterns: beside one of these, `tokenizer_config.json` is not alone."""

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models without a chat template: a line per message, as in a script of a play."""

_loading = threading.Lock()
"""transformers imports its modules when they are first used, and fails where two threads do so at once."""


def model_directory(model: str | Path | None) -> Path:
    """Where a model is: the directory or GGUF file given, or the directory of the packaged one ("demo" or None)."""
    return DEMO_MODEL if model is None or str(model) == "demo" else Path(model)


def check_model_directory(path: Path) -> None:
    """Refuse what is no model's directory or GGUF file, before an engine is started for it.

    Raises:
        ModelLoadError: there is no such directory, it has no config.json, or one of its files is no regular file; or
            the GGUF file cannot be read.
    """
    if is_gguf(path):
        from pointsman.engine.gguf.reader import read_gguf

        read_gguf(path)
        return
    if not path.is_dir():
        raise ModelLoadError(
            f"no model directory at {path}; give a directory with config.json and *.safetensors, or a .gguf file"
        )
    _check_files(path)
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json; give a directory in the Hugging Face format, or a .gguf file")


def weights_size(path: Path) -> int:
    """Bytes of a model's weights on the disk.

    Raises:
        ModelLoadError: the GGUF file cannot be read.
    """
    if not is_gguf(path):
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    from pointsman.engine.gguf.reader import read_gguf

    return sum(tensor.data.nbytes for tensor in read_gguf(path).tensors.values())


def _check_files(path: Path) -> None:
    """Refuse named pipes and the like, which would be waited for, and links that lead nowhere.

    Raises:
        ModelLoadError: a file of a model is none that can be read.
    """
    for file in sorted(path.iterdir()):
        if file.suffix not in MODEL_SUFFIXES:
            continue
        try:
            with open_regular(file):
                pass
        except OSError as error:
            if not file.is_dir():
                raise ModelLoadError(f"{file} cannot be read: {error.strerror}; copy it again") from None


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelLoadError: there is none, or something else.
    """
    try:
        content = json.loads(read_regular(file, MAX_SETTINGS).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {first_line(error)}; copy it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds no JSON object but a {type(content).__name__}; copy it again")
    return content


def read_tokenizer(path: Path) -> Any | None:
    """The tokenizer of a model's directory or GGUF file; None if it has none.

    Raises:
        ModelLoadError: its files cannot be read, or there is no vocabulary among them.
    """
    if is_gguf(path):
        with _loading:
            from pointsman.engine.gguf.reader import read_gguf
            from pointsman.engine.gguf.tokenizer import make_tokenizer

            return make_tokenizer(read_gguf(path))
    if path.is_dir():
        _check_files(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        logger.warning("%s has no tokenizer; prompts must be token ids", path)
        return None
    _check_tokenizer_files(path)
    with _loading:
        from transformers import AutoTokenizer

        try:
            # A model's own code is never run: transformers would ask on standard input whether it may be.
            return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise ModelLoadError(
                    f"{path}: its tokenizer needs code of its own (auto_map), which is not run here; convert it to a "
                    "tokenizer.json"
                ) from None
            raise ModelLoadError(
                f"{path}: the tokenizer cannot be loaded: {first_line(error)}; copy the model's tokenizer files again"
            ) from error


def _check_tokenizer_files(path: Path) -> None:
    """Refuse settings of a tokenizer that are no JSON object, that hold a value of a wrong type, or that stand alone.

    Of settings that stand alone transformers makes an empty tokenizer, or an error of several lines.
    """
    settings = path / TOKENIZER_CONFIG
    if not settings.is_file():
        return
    content = read_object(settings)
    if not any(next(path.glob(pattern), None) for pattern in VOCABULARY_FILES):
        raise ModelLoadError(
            f"{path} has {TOKENIZER_CONFIG} and no vocabulary beside it; copy the model's tokenizer.json there, or "
            f"remove {TOKENIZER_CONFIG} to give prompts as token ids"
        )
    for name, value in content.items():
        is_right, wanted = TOKENIZER_FIELDS.get(name, (None, ""))
        if value is not None and is_right is not None and not is_right(value):
            raise ModelLoadError(
                f"{settings}: {name} is {represented(value)}; it must be {wanted}; correct or remove it"
            )


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_template(value: Any) -> bool:
    """Text, texts by name, or a list of names with texts."""
    if isinstance(value, list):
        return all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in value)
    texts = value.values() if isinstance(value, dict) else [value]
    return all(isinstance(one, str) for one in texts)


TOKENIZER_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("eos_token", "bos_token", "pad_token", "unk_token"), (_is_token, "the text of a token")),
    "chat_template": (_is_template, "a Jinja template as text"),
    "tokenizer_class": (lambda value: isinstance(value, str), "the name of a class"),
    "added_tokens_decoder": (lambda value: isinstance(value, dict), "an object of token id -> token"),
    "model_max_length": (
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1,
        "a number of at least 1",
    ),
    "model_input_names": (
        lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
        "a list of names",
    ),
    **dict.fromkeys(("padding_side", "truncation_side"), (lambda value: value in ("left", "right"), "left or right")),
    **dict.fromkeys(
        ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "split_special_tokens"),
        (lambda value: isinstance(value, bool), "true or false"),
    ),
}
"""Of tokenizer_config.json: whether a value is right, and what it must be."""


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The text's token ids, with BOS and the like where the tokenizer adds them.

    Raises:
        ValueError: the text is none that one could read, or the tokenizer is broken.
    """
    try:
        token_ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except TypeError as error:  # what tokenizers says of lone surrogates, which UTF-8 has no bytes for
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the prompt is not valid Unicode text (a lone surrogate); remove or replace it") from None
        raise ValueError(
            f"the tokenizer failed: {first_line(error)}; copy the model's tokenizer files again"
        ) from error
    return token_ids


def render_chat(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """What a chat template makes of a conversation: a prompt with the special tokens written out.

    Args:
        options: what `apply_chat_template` of transformers takes; `chat_template` None: the tokenizer's own.

    Raises:
        ValueError: there is no template, or it fails on this conversation.
    """
    if options.get("chat_template") is None and not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template; give chat_template, or use generate")
    try:
        text: str = tokenizer.apply_chat_template([dict(one) for one in conversation], tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        raise ValueError(f"the chat template failed: {first_line(error)}") from error
    return text
