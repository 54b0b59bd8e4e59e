"""Loads tokenizers, encodes text and renders chat templates. It needs no PyTorch, because an API process uses it.

An exception that a tokenizer or a chat template raises becomes a `ValueError` of one line.
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
"""Patterns of names of vocabulary files; a file that matches must accompany `tokenizer_config.json`."""

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template for models that have none: a line per message, with the message's role and content."""

_loading = threading.Lock()
"""Lock around loading a tokenizer: transformers imports its modules on first use, and fails if two threads import at
the same time."""


def model_directory(model: str | Path | None) -> Path:
    """The path of a model's directory or GGUF file: `model` itself, or the directory of the packaged model for "demo"
    or None."""
    return DEMO_MODEL if model is None or str(model) == "demo" else Path(model)


def check_model_directory(path: Path) -> None:
    """Refuse a path that is not a model's directory or GGUF file, before an engine is started for it.

    Raises:
        ModelLoadError: there is no such directory, the directory has no config.json or has a file that is not regular,
            or the GGUF file cannot be read.
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
    """Size of the weights of a model's directory or GGUF file, in bytes.

    Raises:
        ModelLoadError: the GGUF file cannot be read.
    """
    if not is_gguf(path):
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    from pointsman.engine.gguf.reader import read_gguf

    return sum(tensor.data.nbytes for tensor in read_gguf(path).tensors.values())


def _check_files(path: Path) -> None:
    """Refuse a model's directory with files that are not regular, such as named pipes, whose reading would block, and
    broken links.

    Raises:
        ModelLoadError: a file of a model cannot be read.
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


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        ModelLoadError: the file cannot be read, or has no JSON object.
    """
    try:
        content = json.loads(read_regular(file, MAX_SETTINGS).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {first_line(error)}; copy it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must have a JSON object, not a {type(content).__name__}; copy it again")
    return content


def read_tokenizer(path: Path) -> Any | None:
    """Load the tokenizer of a model's directory or GGUF file; None if there is no tokenizer.

    Raises:
        ModelLoadError: the tokenizer's files cannot be read, or have no vocabulary.
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
            # A model's own code is never run; otherwise transformers would ask for permission on standard input.
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
    """Refuse settings of a tokenizer that are not a JSON object, have a value of a wrong type, or have no vocabulary
    file.

    Without a vocabulary file transformers makes an empty tokenizer, or raises an error of several lines.
    """
    settings = path / TOKENIZER_CONFIG
    if not settings.is_file():
        return
    content = read_json_object(settings)
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
    """Whether a value of tokenizer_config.json is a chat template: text, an object of name -> text, or a list of
    objects with a name and a template."""
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
"""Field of tokenizer_config.json -> the check of its value, and a description of valid values for errors."""


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Tokenize a text; return its token ids, with the special tokens (BOS) that the tokenizer adds.

    Raises:
        ValueError: the text is not valid Unicode, or the tokenizer is broken.
    """
    try:
        token_ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except TypeError as error:  # tokenizers raises it for lone surrogates, which UTF-8 cannot encode
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the prompt is not valid Unicode text (a lone surrogate); remove or replace it") from None
        raise ValueError(
            f"the tokenizer failed: {first_line(error)}; copy the model's tokenizer files again"
        ) from error
    return token_ids


def render_chat(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Render a conversation with a chat template to a prompt with the special tokens written out.

    Args:
        options: arguments of transformers' `apply_chat_template`; if `chat_template` is None, the tokenizer's template
            is used.

    Raises:
        ValueError: there is no template, or the template fails on this conversation.
    """
    if options.get("chat_template") is None and not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template; give chat_template, or use generate")
    try:
        text: str = tokenizer.apply_chat_template([dict(one) for one in conversation], tokenize=False, **options)
    except Exception as error:  # templates may raise anything
        raise ValueError(f"the chat template failed: {first_line(error)}") from error
    return text
