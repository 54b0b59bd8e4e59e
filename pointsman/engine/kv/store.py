"""KVStore: keeps KV blocks as files, for other engines and for later runs.

Each full block is a file, named by the block's content key (`pointsman/core/kv/digests.py`). The folder is named by a
fingerprint of everything else that must be equal: the model's configuration and weights, the element type, the block
size.

    DIR/3f0a52c8d1e94b67a0c2/7b/7b9e...safetensors        folder by fingerprint, first byte of the key, key

With several groups of layers, each group has its own file for a block, whose name ends with the number of the group.

A file is written under another name and renamed, so it appears completely or not at all. A file is used only if its
size, names, shapes, types, fingerprint, key and checksum are right; otherwise it counts as missing. So a file may be
truncated, damaged or removed at any time, at the cost of a recomputation. The checksum guards against accidents, not
against attackers: write access to the directory allows control of the model's output, read access reveals prompts.
Protect the directory like the prompts.

When the directory exceeds its limit, the least recently used files are removed first. Each process counts the bytes
that it has written, and reads the sizes of all files when the total may exceed the limit.
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
"""Maximum size of a file's header, in bytes."""
OURS = re.compile(
    r"[0-9a-f]{20}/([0-9a-f]{2})/\1([0-9a-f]{62}([0-9a-f]{4})?|[0-9a-f]{14}-[0-9-]+)(?P<end>\.safetensors|\.part)"
)
"""Pattern of the paths, relative to the directory, of files that a KV store has written, completely or not."""
ABANDONED_AFTER = 3600.0
"""Seconds since the last write after which an unfinished file counts as left by a process that has ended, and is
removed."""
KEPT_SHARE = 0.9
"""Share of the size limit down to which files are removed when the limit is exceeded."""


class BadBlock(Exception):
    """A file that cannot be read, or whose content is not the block that its name says."""


class BlockFolder:
    """The files of one model, element type and block size. Safe to use from several threads and processes.

    Args:
        path: path of the folder, which is made on the first write.
        fingerprint: hexadecimal digest of everything that the blocks in this folder have in common.
        pool: the KV pool whose blocks are written and read.
    """

    def __init__(self, path: Path, fingerprint: str, pool: KVPool) -> None:
        self.path = path
        self._fingerprint = fingerprint
        self._layout = {name: (tensor.shape, tensor.dtype) for name, tensor in pool.block(0).items()}
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._layout.values())
        self._max_bytes = num_bytes + MAX_HEADER
        self._known: set[bytes] = set()  # keys whose files were seen, and may have been removed since
        self._damaged: set[bytes] = set()
        self._numbers = itertools.count()

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / (name + SUFFIX)

    def has_seen(self, key: bytes) -> bool:
        """Whether a file of this key was seen and is not marked as damaged. Does not access the disk."""
        return key in self._known and key not in self._damaged

    def has(self, key: bytes) -> bool:
        """Whether a file of this key exists, or existed when it was last looked up, and is not marked as damaged."""
        if key in self._damaged:
            return False
        if key not in self._known:
            if not os.path.exists(self.path_of(key)):
                return False
            self._known.add(key)
        return True

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys that have files."""
        return next((index for index, key in enumerate(keys) if not self.has(key)), len(keys))

    def read(self, key: bytes) -> dict[str, Tensor]:
        """Read and check the file of a block; return its keys and values, named as by `KVPool.block`.

        Raises:
            FileNotFoundError: there is no such file.
            BadBlock: the file cannot be read, or its content is not valid.
        """
        try:
            return self._parse(key, read_regular(self.path_of(key), self._max_bytes))
        except FileNotFoundError:
            self._known.discard(key)
            raise
        except OSError as error:  # not a regular file, too large, or a failing disk
            self._known.discard(key)
            raise BadBlock(str(error.strerror)) from error
        except BadBlock:
            self._known.discard(key)
            raise

    def _parse(self, key: bytes, data: bytes) -> dict[str, Tensor]:
        try:
            tensors = safetensors.torch.load(data)  # also checks the header
            header: Any = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        except (ValueError, SafetensorError, KeyError) as error:
            raise BadBlock(f"it is no safetensors file: {error}") from None
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if layout != self._layout:
            raise BadBlock("its tensors have other shapes or types than the blocks of the KV pool")
        if header.get("__metadata__") != self._metadata(key, tensors):
            raise BadBlock("its content is not the block that its name says, or its checksum is wrong")
        return tensors

    def write(self, key: bytes, block: dict[str, Tensor]) -> int:
        """Write the file of a block; return the file's size, or 0 if a file exists that is not marked as damaged.

        Raises:
            OSError: the file cannot be written.
        """
        path = self.path_of(key)
        if key not in self._damaged and path.exists():
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
        self._damaged.discard(key)
        return len(data)

    def mark_damaged(self, keys: Sequence[bytes]) -> None:
        """Stop reading the files of these keys, because one of them is damaged; `write` may overwrite them."""
        self._damaged.update(keys)

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Mark the files of these keys as used now, the file of an earlier key slightly later than the file of the next
        key, so that a prefix outlives its continuations."""
        now = time.time_ns()
        for index, key in enumerate(keys):
            try:
                os.utime(self.path_of(key), ns=(now - 1000 * index, now - 1000 * index))
            except OSError:  # removed, or read-only
                continue

    def _metadata(self, key: bytes, tensors: dict[str, Tensor]) -> dict[str, str]:
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(as_bytes(tensors[name]))
        return {"format": FORMAT, "fingerprint": self._fingerprint, "key": key.hex(), "sha256": digest.hexdigest()}


class KVStore:
    """The directory in which one engine keeps KV files, with a folder per model.

    Args:
        directory: path of the directory, which is made if it does not exist.
        fingerprint: function that returns 32 bytes which identify the model with its current weights; it takes seconds
            for a large model (`model/fingerprint.py`).
        pool: the engine's KV pool.
        max_bytes: maximum total size of the files of all models in the directory; None: no limit.

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
            raise ConfigError(f"kv_store is {str(directory)!r}, which cannot be used as a directory: {error}") from None
        self._model_fingerprint = fingerprint
        self._pool = pool
        self._max_bytes = max_bytes
        self._folder: BlockFolder | None = self._find_folder()
        self._num_bytes = 0 if max_bytes is None else sum(size for _, size, _ in self._list_files())

    @property
    def folder(self) -> BlockFolder:
        """The folder for the model's current weights. Only the thread that owns the engine may call this."""
        if self._folder is None:
            self._folder = self._find_folder()
        return self._folder

    def reset(self) -> None:
        """Forget the folder, because the weights have changed or will change: the next use of `folder` computes the
        fingerprint again."""
        self._folder = None

    def _find_folder(self) -> BlockFolder:
        pool = self._pool
        parts = [FORMAT, self._model_fingerprint().hex(), str(pool.dtype), pool.block_size, pool.layers]
        if pool.layout.groups:
            parts.append(pool.layout)
        fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()
        return BlockFolder(self.directory / fingerprint[:20], fingerprint, pool)

    def count_written(self, num_bytes: int) -> None:
        """Count `num_bytes` of newly written files; remove old files if the size limit is exceeded. Only the writing
        thread may call this."""
        self._num_bytes += num_bytes
        if self._max_bytes is None or self._num_bytes <= self._max_bytes:
            return
        files = sorted(self._list_files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._max_bytes * KEPT_SHARE:
                break
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("the KV store cannot remove %s: %s", path, error)
                continue
            total -= size
        self._num_bytes = total

    def _list_files(self) -> list[tuple[int, int, Path]]:
        """Return the time of last use (ns), size (bytes) and path of each completely written file. Incomplete files of
        processes that have ended are removed."""
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
            except OSError:  # another process has removed the file
                continue
        return found
