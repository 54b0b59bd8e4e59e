"""KV in a directory: damaged files are ignored, and engines read KV that others computed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.core import ConfigError, RequestStatus
from pointsman.engine import AsyncEngine, Engine, EngineStepError, RequestOutput
from pointsman.engine.kv.connector import EngineConnector
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.kv.store import ABANDONED_AFTER, BadBlock, BlockFolder, KVStore
from pointsman.engine.model.fingerprint import model_fingerprint
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.model.prepared import PreparedStep
from tests.engine.kv_requests import (
    PARAMS,
    TIGHT,
    add_round,
    break_passes,
    check,
    drain,
    make,
    prompt_of,
    run_rounds,
    settle,
)
from tests.engine.tiny_models import FAMILIES, build
from tests.forked_engines import fork_server

KEYS = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, list[int]]:
    return run_rounds(make(loaded))


def open_store(directory: Path, loaded: LoadedModel, max_bytes: int | None = None, **knobs: Any) -> KVStore:
    pool = make(loaded, num_blocks=16, **knobs).kv_pool
    return KVStore(directory, partial(model_fingerprint, loaded), pool, max_bytes=max_bytes)


def block_of(store: KVStore, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = store._pool.block(0)
    return {name: torch.randn(part.shape, generator=generator).to(part.dtype) for name, part in shapes.items()}


def connector_of(engine: Engine) -> EngineConnector:
    assert engine.kv_connector is not None
    return engine.kv_connector


# ------------------------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_is_read_as_it_was_written(tmp_path: Path, loaded: LoadedModel, dtype: str) -> None:
    folder = open_store(tmp_path, loaded, kv_cache_dtype=dtype).folder
    block = block_of(open_store(tmp_path, loaded, kv_cache_dtype=dtype), 1)
    assert folder.num_found(KEYS) == 0
    size = folder.write(KEYS[0], block)
    assert size == folder.path_of(KEYS[0]).stat().st_size
    assert folder.write(KEYS[0], block) == 0, "it is there already"
    other = open_store(tmp_path, loaded, kv_cache_dtype=dtype).folder
    assert other.num_found(KEYS) == 1
    assert all(torch.equal(part, block[name]) for name, part in other.read(KEYS[0]).items())
    with pytest.raises(FileNotFoundError):
        other.read(KEYS[1])


def test_a_damaged_file_is_never_used(tmp_path: Path, loaded: LoadedModel) -> None:
    """Cut at every length, with any byte changed, or grown."""
    store = open_store(tmp_path, loaded)
    folder, choose = store.folder, random.Random(1)
    folder.write(KEYS[0], block_of(store, 1))
    path = folder.path_of(KEYS[0])
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in [*range(0, header + 20), *choose.sample(range(header, len(whole)), 50)]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadBlock):
            folder.read(KEYS[0])
    path.write_bytes(whole + b"\0")
    with pytest.raises(BadBlock):
        folder.read(KEYS[0])
    for place in [*range(0, header), *choose.sample(range(header, len(whole)), 100)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << choose.randrange(8)]) + whole[place + 1 :])
        try:
            found = folder.read(KEYS[0])
        except BadBlock:
            continue
        assert all(torch.equal(part, block_of(store, 1)[name]) for name, part in found.items()), f"byte {place}"
    path.write_bytes(whole)
    assert folder.read(KEYS[0])


def test_a_pipe_or_an_endless_file_is_not_read(tmp_path: Path, loaded: LoadedModel) -> None:
    store = open_store(tmp_path, loaded)
    folder = store.folder
    folder.write(KEYS[0], block_of(store, 1))
    path = folder.path_of(KEYS[0])
    os.truncate(path, 10**12)
    with pytest.raises(BadBlock, match="more than"):
        folder.read(KEYS[0])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadBlock, match="it is a named pipe"):
        folder.read(KEYS[0])


def test_a_file_with_other_content_is_never_used(tmp_path: Path, loaded: LoadedModel) -> None:
    """A file under the name of another block, model or layout."""
    store, narrow = open_store(tmp_path, loaded), open_store(tmp_path, loaded, kv_cache_dtype="bfloat16")
    other = open_store(tmp_path, wrap_model(build(FAMILIES["qwen3"](), seed=2)))
    short = open_store(tmp_path, loaded, block_size=2)
    folders = [one.folder for one in (store, narrow, other, short)]
    assert len({folder.path for folder in folders}) == 4
    for one in (store, narrow, other, short):
        one.folder.write(KEYS[0], block_of(one, 1))
    target = store.folder.path_of(KEYS[1])
    target.parent.mkdir(exist_ok=True)
    for folder in folders:
        os.link(folder.path_of(KEYS[0]), target)
        assert store.folder.num_found([KEYS[1]]) == 1
        with pytest.raises(BadBlock):
            store.folder.read(KEYS[1])
        target.unlink()
    for folder in folders[1:]:
        store.folder.path_of(KEYS[0]).unlink()
        os.link(folder.path_of(KEYS[0]), store.folder.path_of(KEYS[0]))
        with pytest.raises(BadBlock):
            store.folder.read(KEYS[0])


def test_the_directory_stays_below_its_limit_with_the_newest_files(tmp_path: Path, loaded: LoadedModel) -> None:
    size = open_store(tmp_path / "size", loaded).folder.write(KEYS[0], block_of(open_store(tmp_path, loaded), 0))
    store = open_store(tmp_path / "store", loaded, max_bytes=5 * size)
    for number, key in enumerate(KEYS[:5]):
        store.count_written(store.folder.write(key, block_of(store, number)))
        os.utime(store.folder.path_of(key), (1000 + number, 1000 + number))
    assert store.folder.num_found(KEYS[:5]) == 5
    store.folder.mark_used([KEYS[0]])
    store.count_written(store.folder.write(KEYS[5], block_of(store, 5)))
    fresh = open_store(tmp_path / "store", loaded).folder
    assert [fresh.has(key) for key in KEYS[:6]] == [True, False, False, True, True, True]
    prefix_first = sorted(KEYS[3:6], key=lambda key: fresh.path_of(key).stat().st_mtime_ns)
    fresh.mark_used(KEYS[3:6])
    assert sorted(KEYS[3:6], key=lambda key: -fresh.path_of(key).stat().st_mtime_ns) == KEYS[3:6] == prefix_first


def test_foreign_files_in_the_directory_are_never_removed(tmp_path: Path, loaded: LoadedModel) -> None:
    mine = [tmp_path / "notes.txt", tmp_path / "models/qwen/model.safetensors", tmp_path / "a/b/c/d.part"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10_000)
    store = open_store(tmp_path, loaded, max_bytes=1)
    left_behind = store.folder.path_of(KEYS[3]).with_name(KEYS[3].hex()[:16] + "-77-0.part")
    unfinished = left_behind.with_name(KEYS[3].hex()[:16] + "-78-0.part")
    left_behind.parent.mkdir(parents=True)
    left_behind.write_bytes(b"torn")
    unfinished.write_bytes(b"just now")
    long_ago = time.time() - 2 * ABANDONED_AFTER
    os.utime(left_behind, (long_ago, long_ago))
    store.count_written(store.folder.write(KEYS[0], block_of(store, 0)))
    assert all(path.exists() for path in mine) and unfinished.exists()
    assert not left_behind.exists() and not store.folder.path_of(KEYS[0]).exists()


def test_an_unusable_directory_is_refused(tmp_path: Path, loaded: LoadedModel) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="which cannot be used as a directory"):
        make(loaded, kv_store=tmp_path / "file" / "store")


def test_an_interrupted_write_leaves_no_file(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, loaded)
    write = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space"):
        store.folder.write(KEYS[0], block_of(store, 1))
    monkeypatch.undo()
    assert not store.folder.has(KEYS[0]) and not [path for path in tmp_path.glob("*/*/*") if path.is_file()]
    assert store.folder.write(KEYS[0], block_of(store, 1)) > 0 and store.folder.read(KEYS[0])


def small_pool() -> KVPool:
    return KVPool([LayerShape(2, 64, 64, 2)] * 4, num_blocks=1, block_size=32, dtype=torch.float32)


def write_forever(folder: str) -> None:
    """The code of the process that is killed."""
    pool = small_pool()
    for part in pool.block(0).values():
        part.fill_(3.0)
    blocks = BlockFolder(Path(folder), "f", pool)
    print("ready", flush=True)
    for number in count():
        blocks.write(number.to_bytes(32, "big"), pool.block(0))


@pytest.mark.e2e
def test_a_process_killed_while_writing_leaves_no_partial_block(tmp_path: Path) -> None:
    for number in range(4):
        output, theirs = os.pipe()
        with open(output) as said:
            process = fork_server().start(
                "tests.engine.kv.test_kv_store:write_forever",
                [str(tmp_path)],
                descriptors=[0, theirs, 2],
                environment=os.environ,
            )
            os.close(theirs)
            assert said.readline() == "ready\n"
            time.sleep(0.05 + 0.03 * number)
            process.send_signal(signal.SIGKILL)
            process.wait()
    folder = BlockFolder(tmp_path, "f", small_pool())
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) > 10
    for path in files:
        assert all(bool((part == 3.0).all()) for part in folder.read(bytes.fromhex(path.stem)).values())


# -------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("steps", [1, 2])
def test_an_engine_reads_the_stored_kv_of_another(
    tmp_path: Path, loaded: LoadedModel, expected: dict[str, list[int]], steps: int
) -> None:
    producer = make(loaded, kv_store=tmp_path, kv_store_role="producer", max_steps_in_flight=steps)
    assert run_rounds(producer) == expected
    settle(producer)
    assert producer.counters.num_loaded_blocks == 0 < producer.counters.num_stored_blocks
    producer.close()
    consumer = make(loaded, kv_store=tmp_path, kv_store_role="consumer", max_steps_in_flight=steps)
    assert run_rounds(consumer) == expected
    settle(consumer)
    assert consumer.counters.num_stored_blocks == 0
    assert consumer.counters.num_external_tokens > 150
    stats = consumer.scheduler.stats()
    assert stats.num_loaded_tokens == 4 * consumer.counters.num_loaded_blocks
    assert stats.num_failed_loads == consumer.counters.num_unloaded_blocks == 0


@pytest.mark.parametrize("steps", [1, 3])
def test_outputs_are_equal_in_a_small_pool_with_every_tier(
    tmp_path: Path, loaded: LoadedModel, expected: dict[str, list[int]], steps: int
) -> None:
    for _ in range(2):
        engine = make(
            loaded, max_steps_in_flight=steps, kv_store=tmp_path, kv_offload_bytes=1 << 16, kv_store_bytes=400_000,
            **(TIGHT | {"num_blocks": 32}),
        )  # fmt: skip
        assert run_rounds(engine) == expected
        settle(engine)
    counters = engine.counters
    assert counters.num_loaded_blocks > 10 < counters.num_restored_blocks
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 400_000


@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_a_conversation_reuses_the_kv_of_generated_tokens(tmp_path: Path, loaded: LoadedModel, length: int) -> None:
    """The last token of an output has no KV yet, even if it fills its block."""
    first = [5 + place for place in range(length)]
    producer = make(loaded, kv_store=tmp_path)
    producer.add_request("a", first, PARAMS)
    second = first + drain(producer)["a"] + [7, 8, 9, 10, 11]
    settle(producer)
    answers = []
    for knobs in ({}, {"kv_store": tmp_path}):
        engine = make(loaded, **knobs)
        engine.add_request("b", second, PARAMS)
        answers.append(drain(engine)["b"])
    assert answers[0] == answers[1]
    assert engine.counters.num_loaded_blocks == (length + PARAMS.max_tokens - 1) // 4


def test_a_request_waits_for_its_kv_load_and_explain_reports_it(tmp_path: Path, loaded: LoadedModel) -> None:
    run_and_store(loaded, tmp_path)
    engine = make(loaded, kv_store=tmp_path)
    release = hold_reads(engine)
    engine.add_request("a", prompt_of(3), PARAMS)
    engine.add_request("b", [9, 9, 9], PARAMS)
    for _ in range(4):
        engine.step()
        check(engine)
    request = engine.scheduler.get_request("a")
    assert request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    told = engine.scheduler.explain("a")
    assert told.transfer is not None and told.since is not None
    release()
    tokens = drain(engine)
    assert set(tokens) == {"a", "b"}
    settle(engine)


def run_and_store(loaded: LoadedModel, directory: Path) -> None:
    engine = make(loaded, kv_store=directory, kv_store_role="producer")
    run_rounds(engine, 1)
    settle(engine)
    engine.close()


def hold_reads(engine: Engine) -> Callable[[], None]:
    """Block the reading of files until the returned function is called."""
    store, released = connector_of(engine).store, threading.Event()
    assert store is not None
    read = store.folder.read

    def waits(key: bytes) -> dict[str, Tensor]:
        assert released.wait(30)
        return read(key)

    store.folder.read = waits  # type: ignore[method-assign]
    return released.set


def test_missing_or_damaged_files_cost_a_recomputation(
    tmp_path: Path, loaded: LoadedModel, expected: dict[str, list[int]]
) -> None:
    run_and_store(loaded, tmp_path)
    choose = random.Random(2)
    for name in ("vanished", "damaged"):
        engine = make(loaded, kv_store=tmp_path, kv_store_role="consumer")
        release = hold_reads(engine)
        add_round(engine, 0)
        engine.step()
        for path in choose.sample(sorted(tmp_path.glob("*/*/*.safetensors")), 12):  # now that they are promised
            if name == "vanished":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-1] + b"?")
        release()
        assert drain(engine) == {key: tokens for key, tokens in expected.items() if key.startswith("0-")}
        assert engine.counters.num_unloaded_blocks > 0 < engine.counters.num_loaded_blocks
        assert engine.scheduler.stats().num_failed_loads > 0
        settle(engine)


def test_a_writing_engine_replaces_damaged_files(
    tmp_path: Path, loaded: LoadedModel, expected: dict[str, list[int]]
) -> None:
    run_and_store(loaded, tmp_path)
    for path in sorted(tmp_path.glob("*/*/*.safetensors"))[::2]:
        path.write_bytes(b"torn")
    num_unloaded = []
    for role in ("consumer", "both", "both"):
        before = {path: path.read_bytes() for path in tmp_path.glob("*/*/*.safetensors")}
        engine = make(loaded, kv_store=tmp_path, kv_store_role=role)
        assert run_rounds(engine, 1) == {key: tokens for key, tokens in expected.items() if key.startswith("0-")}
        settle(engine)
        engine.close()
        num_unloaded.append(engine.counters.num_unloaded_blocks)
        if role == "consumer":
            assert before == {path: path.read_bytes() for path in tmp_path.glob("*/*/*.safetensors")}
    assert num_unloaded[0] > 10 < num_unloaded[1] and num_unloaded[2] == 0


@pytest.mark.parametrize("cause", ["vanished", "timeout"])
def test_with_policy_fail_a_failed_load_ends_its_request(tmp_path: Path, loaded: LoadedModel, cause: str) -> None:
    run_and_store(loaded, tmp_path)
    timeout = 5.0 if cause == "timeout" else None
    now = [0.0]
    engine = make(
        loaded, kv_store=tmp_path, kv_load_failure_policy="fail", kv_load_timeout=timeout, clock=lambda: now[0]
    )
    release = hold_reads(engine)
    engine.add_request("a", prompt_of(3), PARAMS)
    assert engine.step() == []
    if cause == "timeout":
        now[0] = 6.0
    else:
        for path in tmp_path.glob("*/*/*.safetensors"):
            path.unlink()
        release()
    done: list[RequestOutput] = []
    while not done:
        done = engine.step()
    (output,) = done
    assert (output.request_id, output.finished, output.finish_reason) == ("a", True, "error")
    want = "longer than 5.0 s" if cause == "timeout" else "0 of 6 KV blocks could be loaded"
    assert want in (output.finish_detail or "")
    assert not engine.has_unfinished_requests()
    release()
    settle(engine)


def test_an_abort_during_a_load_frees_no_block_being_written(tmp_path: Path, loaded: LoadedModel) -> None:
    run_and_store(loaded, tmp_path)
    engine = make(loaded, kv_store=tmp_path)
    release = hold_reads(engine)
    engine.add_request("a", prompt_of(3), PARAMS)
    engine.step()
    output = engine.abort("a")
    assert output is not None and output.finish_reason == "abort"
    assert engine.scheduler.stats().num_free_blocks < engine.scheduler.stats().num_blocks
    release()
    settle(engine)


@pytest.mark.parametrize("steps", [1, 3])
def test_kv_loads_of_failed_steps_are_repeated(
    tmp_path: Path, loaded: LoadedModel, expected: dict[str, list[int]], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every load is reported once, whether its step had begun it or not."""
    run_and_store(loaded, tmp_path)
    engine = make(loaded, max_steps_in_flight=steps, kv_store=tmp_path, **(TIGHT | {"num_blocks": 32}))
    choose, prepare = random.Random(5), engine.runner.prepare

    def breaks_early(output: Any) -> PreparedStep:
        if choose.random() < 0.1:
            raise RuntimeError("early")
        return prepare(output)

    break_passes(engine, monkeypatch, choose, 0.15)
    monkeypatch.setattr(engine.runner, "prepare", breaks_early)
    failures: list[EngineStepError] = []
    assert run_rounds(engine, failures=failures) == expected
    assert len(failures) > 10 and engine.counters.num_loaded_blocks > 20
    settle(engine)


def test_a_full_disk_affects_the_store_only(
    tmp_path: Path, loaded: LoadedModel, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFolder, "write", is_full)
    engine = make(loaded, kv_store=tmp_path)
    assert run_rounds(engine) == expected
    settle(engine)
    assert engine.counters.num_stored_blocks == 0 < engine.counters.num_unstored_blocks


def change_weights(loaded: LoadedModel, factor: float) -> None:
    loaded.model.model.layers[0].self_attn.k_proj.weight.data.mul_(factor)
    loaded.model.model.layers[0].self_attn.v_proj.weight.data.mul_(factor)


def test_stored_kv_of_other_weights_is_not_found(tmp_path: Path) -> None:
    """After a reset no old KV is found or stored as new; with the old weights it is found again."""
    loaded = wrap_model(build(FAMILIES["qwen3"](), seed=1), fuse=False)
    change_weights(loaded, 2.0)
    new = run_rounds(make(loaded), 1)
    change_weights(loaded, 0.5)
    engine = make(loaded, kv_store=tmp_path)
    old = run_rounds(engine, 1)
    assert old != new
    add_round(engine, 7)
    for _ in range(5):
        engine.step()
    change_weights(loaded, 2.0)
    engine.scheduler.reset_prefix_cache(engine.clock())
    drain(engine)  # its KV is of both weights, and must never be used
    assert run_rounds(engine, 1) == new
    settle(engine)
    assert run_rounds(make(loaded, kv_store=tmp_path), 1) == new
    change_weights(loaded, 0.5)
    again = make(loaded, kv_store=tmp_path)
    assert run_rounds(again, 1) == old
    assert again.counters.num_loaded_blocks > 20


def test_salted_requests_share_only_with_equal_salts(tmp_path: Path, loaded: LoadedModel) -> None:
    tokens = []
    for salt in ("mine", "mine", "yours"):
        engine = make(loaded, kv_store=tmp_path)
        engine.add_request("a", prompt_of(3), PARAMS, cache_salt=salt)
        tokens.append(drain(engine)["a"])
        settle(engine)
        assert engine.counters.num_loaded_blocks == (6 if len(tokens) == 2 else 0)
    assert tokens[0] == tokens[1] == tokens[2]


def test_an_idle_engine_wakes_when_a_load_ends_or_times_out(tmp_path: Path, loaded: LoadedModel) -> None:
    """No other request runs: the end of the load, or its time limit, must wake the thread."""
    run_and_store(loaded, tmp_path)

    async def work() -> None:
        engine = AsyncEngine(
            loaded, num_blocks=64, block_size=4, max_model_len=64, kv_store=tmp_path, log_stats_interval=None,
            kv_load_timeout=0.5,
        )  # fmt: skip
        async with asyncio.timeout(30):
            first = [output async for output in engine.generate(prompt_of(3), PARAMS)][-1]
            assert await engine.call(lambda one: one.counters.num_loaded_blocks) == 6
            release = await engine.call(hold_reads)
            second = [output async for output in engine.generate(prompt_of(6), PARAMS)][-1]
            assert second.finish_reason == "length", "it was computed after half a second"
            assert await engine.call(lambda one: one.scheduler.stats().num_transfers) >= 1
            release()
            stream = engine.generate(prompt_of(7), PARAMS)
            third = [output async for output in stream][-1]
        await engine.shutdown()
        assert [list(one.token_ids) for one in (first, second, third)] == [wanted[f"0-{n}"] for n in (3, 6, 7)]

    wanted = run_rounds(make(loaded), 1)
    asyncio.run(work())


def test_a_dropped_engine_completes_its_writes(tmp_path: Path, loaded: LoadedModel) -> None:
    engine = make(loaded, kv_store=tmp_path)
    run_rounds(engine, 1)
    engine.close()
    assert len(list(tmp_path.glob("*/*/*.safetensors"))) == engine.counters.num_stored_blocks > 20


ONE_SIDE = """
import json, sys
from pointsman.engine import LLM, SamplingParams
role, directory, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
prompts = json.load(sys.stdin)
store = {} if role == "alone" else {"kv_store": directory, "kv_store_role": role}
llm = LLM("demo", max_model_len=512, **store)
params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
outputs = llm.generate(prompts, params, use_tqdm=False)
counters = llm.engine.counters
print(json.dumps([[list(o.outputs[0].token_ids) for o in outputs], counters.num_prompt_tokens,
                  counters.num_external_tokens]))
"""


@pytest.mark.long  # the short form has two servers that do the same: tests/server/test_kv_store_servers.py
@pytest.mark.e2e
def test_one_process_prefills_and_another_decodes(tmp_path: Path) -> None:
    prompts = [f"import {word}\n\nclass {word.title()}:\n    def method(self):\n" * 6 for word in ("json", "os", "re")]

    def process(role: str, max_tokens: int) -> Any:
        import json

        command = [sys.executable, "-c", ONE_SIDE, role, str(tmp_path), str(max_tokens)]
        done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    alone, num_tokens, _ = process("alone", 24)
    first, _, none = process("producer", 1)
    both, _, num_external = process("consumer", 24)
    assert none == 0 and num_external > 0.7 * num_tokens
    assert [tokens[:1] for tokens in alone] == first
    assert both == alone
