"""The configuration file of `pointsman serve`: YAML, one option per line, named as on the command line.

    model: /models/qwen3-0.6b
    preset: low-latency
    max-num-seqs: 48
    served_model_name: [qwen3, default]

Hyphens and underscores are equal. An unknown key is an error, because a misspelt limit would have no effect. Values
have the types of the options; null leaves an option at its default.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pointsman.cli.errors import CommandError, missing_library
from pointsman.cli.options import SIZES
from pointsman.cli.scheduler_options import NUMBERS_OR_WORDS
from pointsman.cli.vllm_options import explanation
from pointsman.core.errors import did_you_mean
from pointsman.files import MAX_WRITTEN, read_input, represented, shown

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list[str]: "text, or a list of texts",
}
SECRETS = {
    "api_key": "api_key_file (a file of keys, one a line) or the variable POINTSMAN_API_KEY",
    "operator_key": "operator_key_file (a file of keys, one a line) or the variable POINTSMAN_OPERATOR_KEY",
}
"""Options with secrets, which the file must not contain, and what to use instead: another option or a variable."""


def read_config(path: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of the file by option, and the place of each value, as "FILE, line 5".

    Args:
        path: the file, UTF-8.
        options: the options that the file may set: name -> annotation, as in `pointsman.cli.options`.

    Raises:
        CommandError: the file cannot be read, is not YAML, or has an invalid key or value; the message names the line.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise CommandError(missing_library("--config", "PyYAML", "server")) from None
    try:
        text = read_input(path, MAX_WRITTEN).decode("utf-8")
    except OSError as error:
        raise CommandError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    try:
        entries = _read_entries(yaml, text, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark is not None else path
        raise CommandError(f"{place}: not YAML: {shown(getattr(error, 'problem', None) or str(error), 200)}") from None
    except RecursionError:
        raise CommandError(f"{path}: its lists are nested too deeply; write one option per line") from None
    if entries is None:
        raise CommandError(f'{path} is not a mapping; write one option a line, like "max_num_seqs: 64"')
    return _check_entries(path, entries, options)


def _read_entries(yaml: Any, text: str, path: str) -> list[tuple[int, object, Any]] | None:
    """(line, key, value) of each entry; None: the document is not a mapping. Only plain types are constructed, as by
    `safe_load`, which reports neither lines nor duplicate keys.

    Values that no option can have are not constructed: aliases in lists of lists could stand for billions of values.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            return None
        entries = []
        for key, value in node.value:
            place = f"{path}, line {key.start_mark.line + 1}"
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if not all(isinstance(one, yaml.ScalarNode) for one in (key, *parts)):
                raise CommandError(
                    f"{place}: {shown(str(key.value))} has a nested value; write a single value or a list like [a, b]"
                )
            try:
                entries.append(
                    (key.start_mark.line + 1, loader.construct_object(key), loader.construct_object(value, deep=True))
                )
            except ValueError as error:  # a number of thousands of digits, the 31st of February
                raise CommandError(f"{place}: {shown(str(error), 200)}") from None
        return entries
    finally:
        loader.dispose()


def _check_entries(
    path: str, entries: list[tuple[int, object, Any]], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for line, key, value in entries:
        place = f"{path}, line {line}"
        name = str(key).replace("-", "_")
        if name in SECRETS:
            raise CommandError(f"{place}: {key} is a secret; use {SECRETS[name]}")
        if name not in options and (why := explanation(name)) is not None:
            raise CommandError(f"{place}: {represented(key)} is an option of vllm serve. {why}")
        if name not in options:
            raise CommandError(f"{place}: {represented(key)} is not an option{_nearest_option_hint(name, options)}")
        if name in lines:
            raise CommandError(f"{place}: {key} was set in line {lines[name]} already; remove one of the two lines")
        lines[name] = line
        if value is not None:
            values[name] = typed(place, name, value, options[name])
    return values, {name: f"{path}, line {lines[name]}" for name in values}


def _nearest_option_hint(name: str, options: Mapping[str, Any]) -> str:
    return f"; {did_you_mean(name, options).rstrip() or 'pointsman serve --help lists them all'}"


def typed(place: str, name: str, value: Any, annotation: Any) -> Any:
    """`value` with the option's type: text becomes a list where the option may be repeated."""
    kind = option_type(annotation)
    if name in SIZES | NUMBERS_OR_WORDS and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if kind == list[str]:
        many = [value] if isinstance(value, str) else value
        if isinstance(many, list) and all(isinstance(one, str) for one in many):
            return many
    elif isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind):
        return value
    wanted = KINDS[kind]
    if name in SIZES:
        wanted = "a size like 64MiB"
    elif name in NUMBERS_OR_WORDS:
        wanted = "a whole number or a word"
    raise CommandError(f"{place}: {name} is {represented(value)}; it must be {wanted}")


def option_type(annotation: Any) -> Any:
    """The type of an option's value: `int` of `Annotated[int | None, ...]`."""
    optional = get_args(annotation)[0]
    if get_origin(optional) is types.UnionType:
        (kind,) = (each for each in get_args(optional) if each is not types.NoneType)
        return kind
    return optional
