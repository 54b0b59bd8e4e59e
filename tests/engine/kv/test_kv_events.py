"""KV events on the wire: our own subscriber and vLLM's decoder read an engine's messages."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from _server_process import free_port

from pointsman.core.kv.digests import block_key, root_key
from pointsman.core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from pointsman.core.kv.prefix_tree import Root
from pointsman.engine import Engine, SamplingParams
from pointsman.engine.kv.events import END_OF_REPLAY, KVEventsConfig, KVEventsPublisher
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from tests.engine.tiny_models import FAMILIES, build
from tests.integrations.vllm_process import VLLM_INSTALLED, vllm_parent

LOCAL = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", "topic": "kv@here"}
DECODE = """
import json, sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
for line in open(sys.argv[1]):
    batch = decoder.decode(bytes.fromhex(line))
    for event in batch.events:
        hashes = [name.hex() for name in getattr(event, "block_hashes", [])]
        print(json.dumps([type(event).__name__, hashes, getattr(event, "token_ids", None), batch.data_parallel_rank]))
"""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


@pytest.fixture
def publisher() -> Iterator[KVEventsPublisher]:
    publisher = KVEventsPublisher(KVEventsConfig(**LOCAL), block_size=2)
    yield publisher
    publisher.close()


def replayed(publisher: KVEventsPublisher, count: int, first: int = 0) -> list[tuple[int, bytes]]:
    """Request messages from `first` on from the replay socket until there are `count`; return numbers and payloads."""
    assert publisher.replay_endpoint is not None
    deadline = time.monotonic() + 10
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(publisher.replay_endpoint)
        while time.monotonic() < deadline:
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            found: list[tuple[int, bytes]] = []
            while socket.poll(5000):
                empty, topic, number, payload = socket.recv_multipart()
                assert empty == b""
                if number == END_OF_REPLAY:
                    break
                assert topic == b"kv@here"
                found.append((int.from_bytes(number, "big"), payload))
            if len(found) >= count:
                return found
    raise AssertionError(f"{count} messages were not there in time")


def test_kv_event_messages_reach_a_subscriber_in_order(publisher: KVEventsPublisher) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.connect(publisher.endpoint)
        socket.subscribe("kv@")
        received: list[list[bytes]] = []
        for _ in range(100):  # messages sent before the subscription are lost
            publisher.publish([AllBlocksCleared()])
            while socket.poll(50):
                received.append(socket.recv_multipart())
            if len(received) >= 3:
                break
    topics, numbers, payloads = zip(*received, strict=True)
    assert set(topics) == {b"kv@here"}
    first = int.from_bytes(numbers[0], "big")
    assert [int.from_bytes(number, "big") for number in numbers] == list(range(first, first + len(numbers)))
    when, events, rank = msgspec.msgpack.decode(payloads[0])
    assert abs(when - time.time()) < 60 and rank == 0
    assert events == [{"type": "AllBlocksCleared"}]


def test_a_kv_event_message_has_the_number_of_its_engine() -> None:
    publisher = KVEventsPublisher(KVEventsConfig(**LOCAL, data_parallel_rank=3), block_size=2)
    publisher.publish([AllBlocksCleared()])
    ((_, payload),) = replayed(publisher, 1)
    assert msgspec.msgpack.decode(payload)[2] == 3
    publisher.close()


def test_kv_events_are_maps_with_vllms_fields(publisher: KVEventsPublisher) -> None:
    publisher.publish([BlockStored([b"a", b"b"], None, [1, 2, 3, 4], Root("salt", None))])
    publisher.publish([BlockRemoved([b"b"])])
    (_, first), (_, second) = replayed(publisher, 2)
    (stored,) = msgspec.msgpack.decode(first)[1]
    assert stored == {
        "type": "BlockStored", "block_hashes": [b"a", b"b"], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
        "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["salt"], None],
    }  # fmt: skip
    assert msgspec.msgpack.decode(second)[1] == [{"type": "BlockRemoved", "block_hashes": [b"b"], "medium": "GPU"}]
    assert [number for number, _ in replayed(publisher, 1, first=1)] == [1]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557", "tcp://broker:5557"])
def test_a_connecting_publisher_warns_that_routers_connect_too(
    address: str, caplog: pytest.LogCaptureFixture, publisher: KVEventsPublisher
) -> None:
    assert not caplog.records, "this one is bound"
    KVEventsPublisher(KVEventsConfig(endpoint=address), block_size=2).close()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and address in record.message and "tcp://*:5557" in record.message


def test_the_publisher_can_bind_to_the_local_machine_only(caplog: pytest.LogCaptureFixture) -> None:
    """By vLLM's rule, only an address with * or :: is bound; the IPv6 address is local, too."""
    config = KVEventsConfig(endpoint=f"tcp://[::1]:{free_port()}")
    publisher = KVEventsPublisher(config, block_size=2)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(config.endpoint)
        socket.subscribe("")
        for _ in range(100):
            publisher.publish([AllBlocksCleared()])
            if socket.poll(50):
                break
        assert len(socket.recv_multipart(zmq.NOBLOCK)) == 3
    publisher.close()
    assert not caplog.records


def published_run(loaded: LoadedModel) -> tuple[Engine, list[bytes]]:
    """An engine that ran requests in a pool too small for them, and all of its messages."""
    engine = Engine(
        loaded, num_blocks=12, block_size=4, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=32,
        kv_events_config=LOCAL,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for index in range(6):
        engine.add_request(f"r{index}", [5, 6, 7, 8, 9, index % 3, *range(10, 10 + index)], params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()
    assert engine.kv_events is not None
    messages = replayed(engine.kv_events, 3)
    again = replayed(engine.kv_events, len(messages))
    assert [number for number, _ in again] == list(range(len(again))), "every message, in order"
    return engine, [payload for _, payload in again]


def cached_names(engine: Engine) -> set[bytes]:
    prefix = engine.scheduler._kv.prefix
    assert prefix is not None
    names = set()
    for block in prefix.blocks():
        root, token_bytes = prefix.content_of(block)
        name = root_key(root)
        for start in range(0, len(token_bytes), 16):
            name = block_key(name, token_bytes[start : start + 16])
        names.add(name)
    return names


def test_published_events_match_the_cached_blocks(loaded: LoadedModel) -> None:
    engine, payloads = published_run(loaded)
    known: set[bytes] = set()
    kinds = set()
    for event in itertools.chain.from_iterable(msgspec.msgpack.decode(payload)[1] for payload in payloads):
        kinds.add(event["type"])
        known = (
            known | set(event["block_hashes"]) if event["type"] == "BlockStored" else known - set(event["block_hashes"])
        )
    assert kinds == {"BlockStored", "BlockRemoved"}
    assert known == cached_names(engine)
    engine.close()


@pytest.mark.long
@pytest.mark.e2e
@VLLM_INSTALLED
def test_vllms_decoder_reads_the_published_messages(loaded: LoadedModel, tmp_path: Path) -> None:
    engine, payloads = published_run(loaded)
    messages = tmp_path / "messages"
    messages.write_text("".join(payload.hex() + "\n" for payload in payloads))
    done = vllm_parent().run("-c", DECODE, messages, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    known: set[str] = set()
    for kind, names, token_ids, rank in told:
        assert rank == 0 and (kind != "BlockStored" or len(token_ids) == 4 * len(names))
        known = known | set(names) if kind == "BlockStored" else known - set(names)
    assert known == {name.hex() for name in cached_names(engine)}
    engine.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"port": 1}, "no field 'port'"),
        ({"publisher": "kafka"}, "publisher is 'kafka'"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"data_parallel_rank": -1}, "data_parallel_rank is -1"),
        ({"endpoint": 5557}, "endpoint is 5557"),
        ("tcp://*:1", "give a KVEventsConfig, or a mapping"),
        ({"endpoint": "tcp://127.0.0.1:1:*"}, "cannot be used"),
    ],
)
def test_invalid_kv_events_configs_are_refused(loaded: LoadedModel, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(loaded, num_blocks=12, kv_events_config=value)


def test_no_kv_events_are_published_by_default(loaded: LoadedModel) -> None:
    for value in (None, {"enable_kv_cache_events": False}, {"publisher": "null"}):
        engine = Engine(loaded, num_blocks=12, kv_events_config=value)
        assert engine.kv_events is None and not engine.scheduler.config.enable_kv_cache_events
