"""Reads a GGUF file: its metadata as Python values, and the type, shape and bytes of each tensor.

The `gguf` library's own `GGUFReader` makes several arrays for every token, which takes 12 seconds for a vocabulary of
262,144 tokens, and does not check the lengths in the file. Here every length is compared with the number of remaining
bytes before it is used. Tensors are views of the mapped file, and the texts of an array are decoded on demand.

The parts of a model are read together: `NAME-00001-of-00003.gguf` has the metadata, and each part has some tensors.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pointsman.engine.errors import ModelLoadError, UnsupportedModel
from pointsman.engine.gguf import PART_NAME
from pointsman.files import MAX_SETTINGS, open_regular, represented, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Supported versions of the format. Version 1 had lengths of 32 bits; no recent converter writes that version."""
MAX_FIELDS = 2**16
"""Maximum number of entries of the metadata; models have some forty entries."""
MAX_TENSORS = 2**18
"""Maximum number of tensors in one file; the largest models have some ten thousand."""
MAX_DIMENSIONS = 4
"""Maximum number of dimensions of a tensor, as in llama.cpp."""
MAX_NAME = 2**16 - 1
"""Maximum number of bytes of a key or of a tensor's name; the format has this limit for keys."""
MAX_TEXTS = 2**22
"""Maximum number of texts in an array; the largest vocabularies have some 300,000 tokens and 600,000 merges."""
MAX_PARTS = 99_999
"""Maximum number of parts of a model; the names of parts have five digits."""
DEFAULT_ALIGNMENT = 32
COPY_AGAIN = "the file is truncated or corrupt; copy it again"

_NUMBERS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
"""Type number in the format -> code of that number type in `struct` and NumPy."""
_FLOAT32, _TEXT, _ARRAY = 6, 8, 9
_LENGTH = struct.Struct("<Q")


def as_decimal(number: np.float32) -> float:
    """The shortest decimal number that rounds to a 32-bit number, for example 1e-05, although the 32-bit number is not
    exactly 1e-05."""
    return float(str(number))


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of texts in a GGUF file that are not yet decoded."""

    place: str
    """The file and the key of the array, for error messages."""
    data: memoryview
    num_texts: int

    def decode(self) -> list[str]:
        """Decode the texts of the array.

        Raises:
            ModelLoadError: a text is not valid UTF-8.
        """
        data, texts, at = self.data, [], 0
        for _ in range(self.num_texts):
            (length,) = _LENGTH.unpack_from(data, at)
            start, at = at + 8, at + 8 + length
            try:
                texts.append(str(data[start:at], "utf-8"))
            except UnicodeDecodeError:
                raise ModelLoadError(f"{self.place}[{len(texts)}] is no UTF-8 text; {COPY_AGAIN}") from None
        return texts


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a GGUF file."""

    file: Path
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Number of elements of each dimension; the last dimension is contiguous, as in PyTorch (the file has the opposite
    order)."""
    data: npt.NDArray[np.uint8]
    """Bytes of the tensor, in an array with the dimensions of `shape`, except the last, which is the number of bytes of
    a row."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The metadata and tensors of a model, from all its parts."""

    path: Path
    """Path of the file, or of the model's first part."""
    parts: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Values by key: numbers, texts, arrays of texts (`Texts`), and arrays of numbers (NumPy)."""
    tensors: Mapping[str, GGUFTensor]

    def text(self, key: str, default: str | None = None) -> str:
        """The text that the metadata has under `key`; `default` if the key is absent.

        Raises:
            ModelLoadError: the value is absent and `default` is None, or it is no text.
        """
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong_value_error(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The boolean that the metadata has under `key`; `default` if the key is absent.

        Raises:
            ModelLoadError: the value has another type.
        """
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong_value_error(key, "true or false")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """The integer of at least 1 that the metadata has under `key`; `default` if the key is absent.

        Raises:
            ModelLoadError: the value is absent and `default` is None, or it is no such integer.
        """
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise self._wrong_value_error(key, f"an integer from 1 to {2**31 - 1}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The number above 0 that the metadata has under `key`; `default` if the key is absent.

        Raises:
            ModelLoadError: the value is absent and `default` is None, or it is no such number.
        """
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._wrong_value_error(key, "a number above 0")
        return float(value)

    def texts(self, key: str) -> list[str]:
        """The array of texts that the metadata has under `key`, decoded.

        Raises:
            ModelLoadError: the value is absent or has another type, or a text is not valid UTF-8.
        """
        value = self._value(key, None)
        if not isinstance(value, Texts):
            raise self._wrong_value_error(key, "an array of texts")
        return value.decode()

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """The array of numbers that the metadata has under `key`.

        Raises:
            ModelLoadError: the value is absent or has another type.
        """
        value = self._value(key, None)
        if not isinstance(value, np.ndarray):
            raise self._wrong_value_error(key, "an array of numbers")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.path} has no field {key}; convert the model again")
        return value

    def _wrong_value_error(self, key: str, expected: str) -> ModelLoadError:
        value = self.metadata.get(key)
        said = f"an array of {value.num_texts} texts" if isinstance(value, Texts) else represented(value)
        return ModelLoadError(f"{self.path}: {key} is {said}; it must be {expected}; convert the model again")


def read_gguf(path: Path) -> GGUFFile:
    """Read the metadata and locate the tensors, in every part of the model.

    Args:
        path: the GGUF file, or any part of the model.

    Raises:
        ModelLoadError: a part is absent, truncated or corrupt.
        UnsupportedModel: the version of the file or the type of a tensor is not supported.
    """
    metadata, tensors = _read_part(path)
    num_parts = metadata.get("split.count", 1)
    if num_parts in (0, 1):
        return GGUFFile(path, (path,), metadata, tensors)
    parts = _part_paths(path, num_parts)
    tensors = {}
    for index, part in enumerate(parts):
        own, more = _read_part(part)
        if index == 0:
            metadata = own
        if own.get("split.no") != index or own.get("split.count") != num_parts:
            raise ModelLoadError(
                f"{part}: split.no is {represented(own.get('split.no'))} and split.count "
                f"{represented(own.get('split.count'))}; they must be {index} and {num_parts}; copy this part again"
            )
        if twice := tensors.keys() & more.keys():
            raise ModelLoadError(
                f"{part}: the tensor {shown(min(twice))} is in another part, too; copy all parts again"
            )
        tensors.update(more)
    num_tensors = metadata.get("split.tensors.count", len(tensors))
    if num_tensors != len(tensors):
        raise ModelLoadError(
            f"{parts[0]}: split.tensors.count is {represented(num_tensors)}, but the parts have {len(tensors)} "
            "tensors; copy all parts again"
        )
    return GGUFFile(parts[0], parts, metadata, tensors)


def _part_paths(path: Path, num_parts: Any) -> tuple[Path, ...]:
    """Paths of all parts of the model to which the file `path` belongs. Raises `ModelLoadError` if a part does not
    exist."""
    name = PART_NAME.fullmatch(path.name)
    if not isinstance(num_parts, int) or not 1 < num_parts <= MAX_PARTS:
        raise ModelLoadError(f"{path}: split.count is {represented(num_parts)}; it must be from 1 to {MAX_PARTS}")
    if name is None:
        raise ModelLoadError(
            f"{path} is one of {num_parts} parts, but its name has no part number; name the parts "
            f"NAME-00001-of-{num_parts:05}.gguf and so on"
        )
    parts = [path.with_name(f"{name['name']}-{number:05}-of-{num_parts:05}.gguf") for number in range(1, num_parts + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(
                f"{part} is missing; the model has {num_parts} parts, copy all of them to this directory"
            )
    return tuple(parts)


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        with open_regular(path) as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise ModelLoadError(
                    f"{path} is no GGUF file: it begins with {start!r}, not {MAGIC!r}; download it again"
                )
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}; give a GGUF file") from None
    cursor = _Cursor(path, data)
    cursor.read_bytes(len(MAGIC))
    version = cursor.read_number(4)
    if version not in VERSIONS:
        kind = "of big-endian numbers" if version and not version & 0xFFFF else f"of version {version}"
        raise UnsupportedModel(f"{path} is a GGUF file {kind}; supported are versions 2 and 3; convert the model again")
    num_tensors, num_fields = cursor.read_number(10), cursor.read_number(10)
    for what, value, limit in (("tensors", num_tensors, MAX_TENSORS), ("fields", num_fields, MAX_FIELDS)):
        if value > limit:
            raise ModelLoadError(f"{path} has {value:,} {what}, more than {limit:,}; {COPY_AGAIN}")
    metadata: dict[str, Any] = {}
    for index in range(num_fields):
        cursor.place = f"field {index + 1} of the metadata"
        key = cursor.read_text(MAX_NAME)
        if key in metadata:
            raise ModelLoadError(f"{path} has the field {shown(key)} twice; {COPY_AGAIN}")
        cursor.place = shown(key)
        metadata[key] = cursor.read_value(cursor.read_number(4))
    return metadata, _read_tensors(cursor, num_tensors, metadata.get("general.alignment", DEFAULT_ALIGNMENT))


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: Any) -> dict[str, GGUFTensor]:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelLoadError(
            f"{cursor.path}: general.alignment is {represented(alignment)}; it must be a power of 2; {COPY_AGAIN}"
        )
    places: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
    for index in range(num_tensors):
        cursor.place = f"tensor {index + 1}"
        name = cursor.read_text(MAX_NAME)
        cursor.place = f"tensor {shown(name)}"
        if name in places:
            raise ModelLoadError(f"{cursor.path}: {cursor.place} occurs twice; {COPY_AGAIN}")
        num_dimensions = cursor.read_number(4)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ModelLoadError(
                f"{cursor.path}: {cursor.place} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}; "
                f"{COPY_AGAIN}"
            )
        shape = tuple(cursor.read_number(10) for _ in range(num_dimensions))[::-1]
        places[name] = (_read_tensor_type(cursor), shape, cursor.read_number(10))
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, (kind, shape, offset) in places.items():
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes, rest = divmod(shape[-1], block_size)
        row_bytes *= block_bytes
        num_bytes = math.prod(shape[:-1]) * row_bytes
        if rest or not num_bytes or start + offset + num_bytes > len(cursor.data):
            raise ModelLoadError(
                f"{cursor.path}: tensor {shown(name)} of type {kind.name} and shape {list(shape)} at byte "
                f"{start + offset:,} does not fit in the file's {len(cursor.data):,} bytes; {COPY_AGAIN}"
            )
        data = np.frombuffer(cursor.data, np.uint8, num_bytes, start + offset).reshape(*shape[:-1], row_bytes)
        tensors[name] = GGUFTensor(cursor.path, name, kind, shape, data)
    return tensors


def _read_tensor_type(cursor: _Cursor) -> GGMLQuantizationType:
    number = cursor.read_number(4)
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise UnsupportedModel(
            f"{cursor.path}: {cursor.place} is of the unknown type {number}; use a quantisation such as Q4_K_M or Q8_0"
        ) from None


class _Cursor:
    """Reads values from a GGUF file one after the other.

    Args:
        path: path of the file, for error messages.
        data: content of the file.
    """

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.place = "the header"
        """Description of the field or tensor that is being read, for error messages."""

    def read_bytes(self, num_bytes: int) -> memoryview:
        """Read the next `num_bytes` bytes.

        Raises:
            ModelLoadError: the file has fewer remaining bytes.
        """
        start, end = self.at, self.at + num_bytes
        if end > len(self.data):
            raise ModelLoadError(
                f"{self.path}: {self.place} needs {num_bytes:,} bytes from byte {start:,} on, but the file has "
                f"only {len(self.data):,} bytes; {COPY_AGAIN}"
            )
        self.at = end
        return self.data[start:end]

    def read_number(self, kind: int) -> Any:
        code = f"<{_NUMBERS[kind]}"
        (value,) = struct.unpack(code, self.read_bytes(struct.calcsize(code)))
        return as_decimal(np.float32(value)) if kind == _FLOAT32 else value

    def read_text(self, max_bytes: int) -> str:
        length = self.read_number(10)
        if length > max_bytes:
            raise ModelLoadError(
                f"{self.path}: {self.place} has {length:,} bytes, more than {max_bytes:,}; {COPY_AGAIN}"
            )
        try:
            return str(self.read_bytes(length), "utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self.path}: {self.place} is no UTF-8 text; {COPY_AGAIN}") from None

    def read_value(self, kind: int) -> Any:
        """Read one value of the metadata; `kind` is the number that the format uses for the value's type."""
        if kind in _NUMBERS:
            return self.read_number(kind)
        if kind == _TEXT:
            return self.read_text(MAX_SETTINGS)
        if kind != _ARRAY:
            raise ModelLoadError(f"{self.path}: {self.place} has a value of the unknown type {kind}; {COPY_AGAIN}")
        kind, length = self.read_number(4), self.read_number(10)
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
            return np.frombuffer(self.read_bytes(length * dtype.itemsize), dtype)
        if kind != _TEXT:
            raise ModelLoadError(f"{self.path}: {self.place} is an array of the unsupported type {kind}; {COPY_AGAIN}")
        return self._read_texts(length)

    def _read_texts(self, num_texts: int) -> Texts:
        if num_texts > MAX_TEXTS:
            raise ModelLoadError(
                f"{self.path}: {self.place} has {num_texts:,} texts, more than {MAX_TEXTS:,}; {COPY_AGAIN}"
            )
        data, at, end = self.data, self.at, len(self.data)
        for _ in range(num_texts):
            if at + _LENGTH.size > end:
                at = end + _LENGTH.size
                break
            at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
        return Texts(f"{self.path}: {self.place}", self.read_bytes(at - self.at), num_texts)
