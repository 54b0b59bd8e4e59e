"""KVEventsPublisher: publishes changes of the prefix cache over ZeroMQ, in vLLM's format.

Each step's events are one message of three frames: the topic, a sequence number (8 bytes, big-endian, from 0) and a
MessagePack array of [seconds since 1970, events, data parallel rank]. Events are maps with a "type": BlockStored,
BlockRemoved, AllBlocksCleared (the interface is that of `vllm/distributed/kv_events.py` of vLLM 0.32; block hashes are
SHA-256, see `pointsman/core/kv/digests.py`). A subscriber that missed messages uses the replay socket: the subscriber's
DEALER socket sends an empty frame and the number of the first missing message (8 bytes, big-endian). It gets the
messages that are still kept, each after an empty frame, then a message with the number -1.

A separate thread sends the messages, so that a step never waits. If it cannot keep up, messages are dropped, and a
subscriber sees a gap in the numbers. Events between two steps are published with the next step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pointsman.core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

MEDIUM = "GPU"
"""vLLM's name for the memory of the model's device; used for every device."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL = 0.1  # seconds between checks of the replay socket


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The settings for publishing events; names and defaults are vLLM's.

    Raises:
        ValueError: a value is out of range.
    """

    enable_kv_cache_events: bool = True
    """Whether events are published."""
    publisher: str = "zmq"
    """Kind of publisher: "zmq", or "null": nothing is published."""
    endpoint: str = "tcp://*:5557"
    """Address to publish at. The publisher binds an address that has a * or ::, or is ipc:// or inproc://; otherwise it
    connects to the address. Routers connect too, so they need an address that the publisher binds."""
    replay_endpoint: str | None = None
    """Address at which the publisher binds the replay socket; None: no replay."""
    buffer_steps: int = 10_000
    """Maximum number of messages kept for replay."""
    hwm: int = 100_000
    """Maximum number of messages that ZeroMQ keeps for a slow subscriber before it drops them."""
    max_queue_size: int = 100_000
    """Maximum number of messages that wait for the sending thread; further messages are dropped."""
    topic: str = ""
    """Text in the first frame of every message, by which subscribers filter."""
    data_parallel_rank: int = 0
    """Number of this engine among the engines of a server; the server sets it. Part of every message."""

    def __post_init__(self) -> None:
        if self.publisher not in ("zmq", "null"):
            raise ValueError(f'kv_events_config: publisher is {self.publisher!r}; choose "zmq" or "null"')
        for name in ("endpoint", "topic"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"kv_events_config: {name} is {getattr(self, name)!r}; it must be text")
        if self.replay_endpoint is not None and not isinstance(self.replay_endpoint, str):
            raise ValueError(f"kv_events_config: replay_endpoint is {self.replay_endpoint!r}; it must be text, or None")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"kv_events_config: {name} is {value!r}; it must be an integer of at least 1")
        rank: object = self.data_parallel_rank
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"kv_events_config: data_parallel_rank is {rank!r}; it must be an integer of at least 0")

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def is_bound(self) -> bool:
        """Whether the publisher binds `endpoint`, so that subscribers connect to it; otherwise the publisher
        connects."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("ipc:", "inproc:"))

    @classmethod
    def of(cls, value: KVEventsConfig | Mapping[str, Any] | None) -> KVEventsConfig | None:
        """Make the configuration from a `KVEventsConfig` or a mapping of its fields; None: nothing is published.

        Raises:
            ValueError: the mapping has an unknown field, or a value is out of range.
        """
        if value is None or isinstance(value, KVEventsConfig):
            config = value
        elif isinstance(value, Mapping):
            known = [field.name for field in fields(cls)]
            if unknown := [name for name in value if name not in known]:
                raise ValueError(f"kv_events_config has no field {unknown[0]!r}; its fields are {', '.join(known)}")
            config = cls(**value)
        else:
            raise ValueError(f"kv_events_config is {value!r}; give a KVEventsConfig, or a mapping of its fields")
        return config if config is not None and config.is_on else None


def _address_to_bind(endpoint: str) -> str:
    """The endpoint with * instead of its host: an address that the publisher binds, on all interfaces."""
    return f"tcp://*:{endpoint.rpartition(':')[2]}"


class KVEventsPublisher:
    """Publishes the events of one engine.

    Args:
        config: settings for publishing.
        block_size: number of tokens per block.
        num_groups: number of groups of layers, each with its own blocks; with several groups, every event has the
            number of its group.

    Raises:
        ValueError: pyzmq or msgspec is missing, or an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig, block_size: int, num_groups: int = 1) -> None:
        try:
            import msgspec
            import zmq
        except ModuleNotFoundError as error:
            raise ValueError(f"kv_events_config needs {error.name}: pip install 'pointsman[kv-events]'") from None
        self._encode = msgspec.msgpack.Encoder().encode
        self._block_size = block_size
        self._names_groups = num_groups > 1
        self._topic = config.topic.encode()
        self._rank = config.data_parallel_rank
        self._next_number = 0
        self._queue: queue.Queue[tuple[int, list[Any]] | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._publish_socket, self._replay_socket = self._open_sockets(config)
        self.endpoint: str = self._publish_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address at which messages are published; a port * is replaced by the actual port."""
        replay = self._replay_socket
        self.replay_endpoint = replay.getsockopt_string(zmq.LAST_ENDPOINT) if replay is not None else None
        self._thread = threading.Thread(target=self._run, name="pointsman-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue events for sending in one message; never waits."""
        if not events or not self._thread.is_alive():
            return
        number = self._next_number
        self._next_number += 1
        try:
            self._queue.put_nowait((number, [time.time(), list(events), self._rank]))
        except queue.Full:
            logger.warning(
                "KV events: message %d is dropped: %d messages already wait to be sent", number, self._queue.maxsize
            )

    def close(self, timeout: float = 1.0) -> None:
        """Send the waiting messages, for at most `timeout` seconds, and close the sockets."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                logger.warning("KV events: waiting messages may be lost, because they could not be sent in time")
            self._thread.join(timeout)

    def _open_sockets(self, config: KVEventsConfig) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
        import zmq

        try:
            out = self._context.socket(zmq.PUB)
            out.set_hwm(config.hwm)
            if config.is_bound:
                if "::" in config.endpoint:
                    out.setsockopt(zmq.IPV6, 1)
                out.bind(config.endpoint)
            else:
                out.connect(config.endpoint)
                logger.warning(
                    "kv_events_config: endpoint %s has no *, so the publisher connects to it; routers connect, too, "
                    "and get no events then: for routers, set an endpoint that the publisher binds, such as %s",
                    config.endpoint,
                    _address_to_bind(config.endpoint),
                )
            if config.replay_endpoint is None:
                return out, None
            replay = self._context.socket(zmq.ROUTER)
            replay.bind(config.replay_endpoint)
            return out, replay
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            where = ", ".join(one for one in (config.endpoint, config.replay_endpoint) if one)
            raise ValueError(f"kv_events_config: {where} cannot be used: {error}; choose other endpoints") from None

    def _run(self) -> None:
        while True:
            try:
                self._serve_replay()
                try:
                    entry = self._queue.get(timeout=_POLL)
                except queue.Empty:
                    continue
                if entry is None:
                    break
                number, (when, events, rank) = entry
                payload = self._encode([when, [self._as_map(event) for event in events], rank])
                frame = number.to_bytes(8, "big")
                self._publish_socket.send_multipart((self._topic, frame, payload))
                self._kept.append((frame, payload))
            except Exception:  # subscribers see the gap; the next message may be sent
                logger.exception("KV events: a message could not be sent")
                time.sleep(_POLL)
        self._context.destroy(linger=500)

    def _serve_replay(self) -> None:
        socket = self._replay_socket
        if socket is None or not socket.poll(0):
            return
        client, *rest = socket.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            logger.warning("KV events: a request for replay is ignored, because it is not one number of 8 bytes")
            return
        for frame, payload in self._kept:
            if frame >= rest[1]:
                socket.send_multipart((client, b"", self._topic, frame, payload))
        socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _as_map(self, event: KVEvent) -> dict[str, Any]:
        group = {"group_idx": event.group} if self._names_groups and not isinstance(event, AllBlocksCleared) else {}
        if isinstance(event, BlockStored):
            stored: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": self._block_size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": event.adapter_name,
            }
            extra_keys = event.extra_keys()
            if any(extra_keys):
                stored["extra_keys"] = extra_keys
            return stored | group
        if isinstance(event, BlockRemoved):
            return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": MEDIUM} | group
        return {"type": "AllBlocksCleared"}
