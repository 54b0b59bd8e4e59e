"""KV in a directory: what one engine has computed, another one reads, now or after a restart.

Each full block is a file, named by its content key (`pointsman/core/kv/digests.py`) in a folder for everything that
must be equal, too: the model's configuration and weights, the type of the elements, the block size.

    DIR/3f0a52c8d1e94b67a0c2/7b/7b9e...safetensors        folder by fingerprint, first byte of the key, key

Of several groups of layers each has a file of its own for a block, whose name ends with the number of the group.

A file is written under another name and renamed, so it appears whole or not at all. A file that is read is used only if
size, names, shapes, types, fingerprint, key and checksum are as they must be; anything else counts as absent. So a file
may be torn, damaged or removed at any moment, which costs a recomputation. The checksum guards against accidents, not
against writers: with write access to the directory one can make the model say anything, with read access one can infer
the prompts. Protect it as you protect the prompts.

Files that were used least recently go first when the directory grows beyond its limit. Each process counts what it
wrote itself, and looks at all files when that may be too much.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from pointsman.core import ConfigError
from pointsman.engine.kv.pool import KVPool, as_bytes
from pointsman.files import read_regular

logger = logging.getLogger(__name__)

FORMAT = "pointsman-kv-1"
SUFFIX = ".safetensors"
UNFINISHED = ".part"
MAX_HEADER = 2**20
"""Bytes of a file beside its elements."""
OURS = re.compile(
    r"[0-9a-f]{20}/([0-9a-f]{2})/\1([0-9a-f]{62}([0-9a-f]{4})?|[0-9a-f]{14}-[0-9-]+)(?P<end>\.safetensors|\.part)"
)
"""Paths of a store's files in its directory, finished or not."""
ABANDONED_AFTER = 3600.0
"""Seconds after which a file that was not finished is taken to be left behind by a process that is gone."""
ROOM = 0.9
"""The share of the limit that is kept when files are removed."""


class BadBlock(Exception):
    """A file that is there and does not hold what its name says."""


class BlockFolder:
    """The files of one model, type of elements, and block size. Safe to use from several threads and processes.

    Args:
        path: of the folder; made when something is written.
        fingerprint: of everything that its files have in common.
        pool: whose blocks they hold.
    """

    def __init__(self, path: Path, fingerprint: str, pool: KVPool) -> None:
        self.path = path
        self._fingerprint = fingerprint
        self._layout = {name: (tensor.shape, tensor.dtype) for name, tensor in pool.block(0).items()}
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._layout.values())
        self._max_bytes = num_bytes + MAX_HEADER
        self._known: set[bytes] = set()  # keys of files that were seen; they may be gone
        self._distrusted: set[bytes] = set()
        self._numbers = itertools.count()

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / (name + SUFFIX)

    def knows(self, key: bytes) -> bool:
        """Whether a file of this key was seen that may be good. Looks at no file."""
        return key in self._known and key not in self._distrusted

    def has(self, key: bytes) -> bool:
        """Whether there is a file of this key that may be good, or was not long ago."""
        if key in self._distrusted:
            return False
        if key not in self._known:
            if not os.path.exists(self.path_of(key)):
                return False
            self._known.add(key)
        return True

    def num_found(self, keys: Sequence[bytes]) -> int:
        """How many of these are there in a row, from the first one on."""
        return next((index for index, key in enumerate(keys) if not self.has(key)), len(keys))

    def read(self, key: bytes) -> dict[str, Tensor]:
        """The parts of a block, named as by `KVPool.block`.

        Raises:
            FileNotFoundError: it is not there.
            BadBlock: it is not what it should be.
        """
        try:
            return self._checked(key, read_regular(self.path_of(key), self._max_bytes))
        except FileNotFoundError:
            self._known.discard(key)
            raise
        except OSError as error:  # no regular file, too large, or the disk fails
            self._known.discard(key)
            raise BadBlock(str(error.strerror)) from error
        except BadBlock:
            self._known.discard(key)
            raise

    def _checked(self, key: bytes, data: bytes) -> dict[str, Tensor]:
        try:
            tensors = safetensors.torch.load(data)  # which checks the header
            header: Any = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        except (ValueError, SafetensorError, KeyError) as error:
            raise BadBlock(f"no safetensors file: {error}") from None
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if layout != self._layout:
            raise BadBlock("other shapes or types than the pool's")
        if header.get("__metadata__") != self._metadata(key, tensors):
            raise BadBlock("another content than its name says, or a wrong checksum")
        return tensors

    def write(self, key: bytes, block: dict[str, Tensor]) -> int:
        """Make a block's file; returns its size, 0 if there is one that may be good.

        Raises:
            OSError: it cannot be written.
        """
        path = self.path_of(key)
        if key not in self._distrusted and path.exists():
            self._known.add(key)
            return 0
        tensors = {name: tensor.cpu() for name, tensor in block.items()}
        data = safetensors.torch.save(tensors, self._metadata(key, tensors))
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.stem[:16]}-{os.getpid()}-{next(self._numbers)}{UNFINISHED}")
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._known.add(key)
        self._distrusted.discard(key)
        return len(data)

    def distrust(self, keys: Sequence[bytes]) -> None:
        """Files of these are not read again, and may be overwritten."""
        self._distrusted.update(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used now; the earlier ones count as used later, so that a prefix outlives what comes behind it."""
        now = time.time_ns()
        for index, key in enumerate(keys):
            try:
                os.utime(self.path_of(key), ns=(now - 1000 * index, now - 1000 * index))
            except OSError:  # it is gone, or only to be read
                continue

    def _metadata(self, key: bytes, tensors: dict[str, Tensor]) -> dict[str, str]:
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(as_bytes(tensors[name]))
        return {"format": FORMAT, "fingerprint": self._fingerprint, "key": key.hex(), "sha256": digest.hexdigest()}


class KVStore:
    """The directory, as one engine uses it.

    Args:
        directory: made if it is not there.
        fingerprint: the name for what the engine's model computes with, 32 bytes, as the weights are now; it takes
            seconds for a large model (`model/fingerprint.py`).
        pool: its KV pool.
        max_bytes: the maximum that all files may take, of all models; None: no limit.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(
        self, directory: str | Path, fingerprint: Callable[[], bytes], pool: KVPool, *, max_bytes: int | None
    ) -> None:
        self.directory = Path(directory).expanduser().absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"kv_store is {str(directory)!r}, which is no usable directory: {error}") from None
        self._model_fingerprint = fingerprint
        self._pool = pool
        self._max_bytes = max_bytes
        self._folder: BlockFolder | None = self._find_folder()
        self._num_bytes = 0 if max_bytes is None else sum(size for _, size, _ in self._files())

    @property
    def folder(self) -> BlockFolder:
        """Of the model as it is now. Only the thread that owns the engine may ask."""
        if self._folder is None:
            self._folder = self._find_folder()
        return self._folder

    def reset(self) -> None:
        """The weights may have changed, or be about to: the next question for the folder looks at them again."""
        self._folder = None

    def _find_folder(self) -> BlockFolder:
        pool = self._pool
        parts = [FORMAT, self._model_fingerprint().hex(), str(pool.dtype), pool.block_size, pool.layers]
        if pool.layout.groups:
            parts.append(pool.layout)
        fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()
        return BlockFolder(self.directory / fingerprint[:20], fingerprint, pool)

    def wrote(self, num_bytes: int) -> None:
        """Files of `num_bytes` bytes are new: if that is too much, others are removed. One thread only."""
        self._num_bytes += num_bytes
        if self._max_bytes is None or self._num_bytes <= self._max_bytes:
            return
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._max_bytes * ROOM:
                break
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("the KV store cannot remove %s: %s", path, error)
                continue
            total -= size
        self._num_bytes = total

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each was used last (ns), its size, and its path; abandoned unfinished files are removed."""
        found = []
        for path in self.directory.glob("*/*/*"):
            match = OURS.fullmatch(path.relative_to(self.directory).as_posix())
            if match is None:  # other files in this directory are never removed
                continue
            try:
                status = path.stat()
                if match["end"] == SUFFIX:
                    found.append((status.st_mtime_ns, status.st_size, path))
                elif time.time() - status.st_mtime > ABANDONED_AFTER:
                    path.unlink()
            except OSError:  # another process was faster
                continue
        return found
