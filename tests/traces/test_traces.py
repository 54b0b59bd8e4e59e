"""Readers of request traces: every format, every kind of broken line, and the tokens made from hash ids."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pointsman.traces import LeftOut, Trace, TraceError, TraceRequest, prompt_token_ids, read_trace, served

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
REAL_TRACES = Path(__file__).parents[3] / "shared" / "traces"


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def mooncake(**changes: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]} | changes)


def qwen(**changes: object) -> str:
    """A line of Qwen-Bailian: 40 tokens are two full blocks of 16 and a partial one."""
    ids = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 7}
    return json.dumps(ids | {"type": "text", "turn": 1, "hash_ids": [1089, 1090, 13148]} | changes)


def azure(prompt: object, output: object) -> str:
    return f"2023-11-16 18:15:46,{prompt},{output}"


def burstgpt(prompt: object, output: object) -> str:
    return f"5,ChatGPT,{prompt},{output},490,Conversation log"


def measured(prompt: object, output: object) -> str:
    return json.dumps({"request_id": "r", "input_toks": prompt, "output_toks": output, "arrival_time": 7.0})


ROWS: dict[str, tuple[str, Callable[[object, object], str]]] = {
    "Azure": (AZURE, azure),
    "BurstGPT": (BURSTGPT, burstgpt),
    "Mooncake": ("", lambda prompt, output: mooncake(input_length=prompt, output_length=output, hash_ids=[])),
    "Qwen-Bailian": ("", lambda prompt, output: qwen(input_length=prompt, output_length=output, hash_ids=[])),
    "measured": ("", measured),
}
"""The header of each line format, and a row with these prompt and output tokens."""


# ---------------------------------------------------------------------- formats


def test_azure_csv_with_crlf_and_seven_digits_is_read(tmp_path: Path) -> None:
    lines = [AZURE, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    first, second = read_trace(write(tmp_path, "\r\n".join(lines)))
    assert first == TraceRequest(arrival_time=0.0, num_prompt_tokens=374, num_output_tokens=44)
    assert second.arrival_time == pytest.approx(4.314579, abs=2e-6)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (396, 109)


def test_azure_csv_with_an_offset_across_midnight_is_read(tmp_path: Path) -> None:
    text = f"\ufeff{AZURE}\n2024-05-10 23:59:59.500000+00:00,10,0\n2024-05-11 00:00:01.250000+00:00,20,7\n\n"
    first, second = read_trace(write(tmp_path, text))
    assert first.num_output_tokens == 0
    assert second.arrival_time == pytest.approx(1.75, abs=2e-6)


def test_burstgpt_csv_is_read(tmp_path: Path) -> None:
    rows = ["5,ChatGPT,472,18,490,Conversation log", "45.5,GPT-4,1087,230,1317,API log"]
    first, second = read_trace(write(tmp_path, "\n".join([BURSTGPT, *rows])))
    assert (first.num_prompt_tokens, first.num_output_tokens) == (472, 18)
    assert second.arrival_time == 40.5


def test_mooncake_trace_has_timestamps_in_milliseconds_and_hash_ids(tmp_path: Path) -> None:
    lines = [mooncake(timestamp=1500), mooncake(timestamp=4000, input_length=20, hash_ids=[9])]
    first, second = read_trace(write(tmp_path, "\n".join(lines)))
    assert first == TraceRequest(0.0, 600, 5, block_hash_ids=(3, 4), hash_block_size=512)
    assert (second.arrival_time, second.block_hash_ids) == (2.5, (9,))


def test_qwen_bailian_trace_has_seconds_and_blocks_of_16_tokens(tmp_path: Path) -> None:
    lines = [qwen(timestamp=60.5, input_length=9, hash_ids=[1089]), qwen(), qwen(timestamp=62.5, hash_ids=[1089, 4, 5])]
    short, first, second = read_trace(write(tmp_path, "\n".join(lines)))
    assert first.arrival_time == pytest.approx(0.614) and second.arrival_time == 2.0
    assert (first.num_prompt_tokens, first.num_output_tokens, first.hash_block_size) == (40, 7, 16)
    a, b, c = (prompt_token_ids(each, 50_000, seed=0, index=index) for index, each in enumerate((first, second, short)))
    assert np.array_equal(a[:16], b[:16]) and np.mean(a[16:] == b[16:]) < 0.05
    assert np.array_equal(a[:9], c)


def test_the_unit_of_time_and_the_block_size_are_inferred_separately(tmp_path: Path) -> None:
    """The unit and the block size are recognised separately: a Mooncake line whose ids cover 16 tokens still counts
    milliseconds."""
    lines = [mooncake(input_length=40, hash_ids=[1, 2, 3]), mooncake(timestamp=1500, input_length=16, hash_ids=[1])]
    _, second = read_trace(write(tmp_path, "\n".join(lines)))
    assert (second.arrival_time, second.hash_block_size) == (1.5, 16)
    lines = [qwen(hash_ids=[7]), qwen(timestamp=62.114, input_length=600, hash_ids=[7, 8])]
    _, second = read_trace(write(tmp_path, "\n".join(lines)))
    assert (second.arrival_time, second.hash_block_size) == (1.0, 512)


def test_measured_requests_are_sorted_by_arrival(tmp_path: Path) -> None:
    rows = [
        {"request_id": f"bench-{i}", "input_toks": 10 + i, "output_toks": 20, "arrival_time": arrival, "queued_ts": 1.0}
        for i, arrival in enumerate([1777142838.5, 1777142837.0])
    ]
    later, first = rows
    requests = read_trace(write(tmp_path, "\n".join(json.dumps(row) for row in rows)))
    assert [request.num_prompt_tokens for request in requests] == [first["input_toks"], later["input_toks"]]
    assert [request.arrival_time for request in requests] == [0.0, 1.5]


def test_limit_stops_reading_before_later_lines(tmp_path: Path) -> None:
    path = write(tmp_path, f"{mooncake()}\n{mooncake()}\nbroken")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(ValueError, match="limit is 0"):
        read_trace(path, limit=0)


# ---------------------------------------------------------------------- what is left out


@pytest.mark.parametrize("name", ROWS)
def test_rows_without_prompt_or_output_are_left_out_and_counted(tmp_path: Path, name: str) -> None:
    header, row = ROWS[name]
    text = "\n".join(["\ufeff" + header, "", row(0, 3), row(10, 5), row(0, 0), "  ", row(20, 0), ""])
    trace = read_trace(write(tmp_path, text.replace("\ufeff\n", "\ufeff")))
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in trace] == [(10, 5), (20, 0)]
    assert (trace.num_rows, trace.left_out) == (4, {LeftOut.NO_PROMPT: 2})
    found = served(trace, "trace")
    assert [r.num_prompt_tokens for r in found] == [10]
    assert (found.num_rows, found.left_out) == (4, {LeftOut.NO_PROMPT: 2, LeftOut.NO_OUTPUT: 1})


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("value", [-1, 2**31, "NaN", "1.5"])
def test_impossible_values_are_errors_in_every_format(tmp_path: Path, name: str, value: object) -> None:
    header, row = ROWS[name]
    first = 2 if header else 1
    for odd in (row(value, 5), row(10, value)):
        path = write(tmp_path, "\n".join([header, row(10, 5), odd][2 - first :]))
        with pytest.raises(TraceError, match=rf"line {first + 1}: .* is .*{value}"):
            read_trace(path)


def test_a_trace_with_nothing_to_serve_explains_why(tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join([AZURE, azure(0, 5), azure(0, 0)]))
    with pytest.raises(
        TraceError,
        match=r"the file has no request that can be read\. Of 2 rows read, 2 are left out: 2 without prompt tokens.",
    ):
        read_trace(path)
    with pytest.raises(
        TraceError, match=r"t\.csv: no request has output tokens\. Of 1 rows read, 1 is left out: 1 without"
    ):
        served(Trace([TraceRequest(0.0, 1, 0)], {}), "t.csv")


# ---------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("text", "line", "wrong"),
    [
        ("hello\n", 1, "no known trace format begins with 'hello'"),
        ('{"prompt": "hello"}\n', 1, 'the line has no "input_length" and no "input_toks"'),
        (
            f"{AZURE}\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:47,374\n",
            3,
            "the line has 2 values, but the header 3",
        ),
        (f"{AZURE}\n2023-11-16 18:15:46,374,many\n", 2, "output tokens is 'many'"),
        (f"{AZURE}\n2023-11-16 18:15:46,-5,44\n", 2, "prompt tokens is -5"),
        (f"{AZURE}\n2023-11-16 18:15:46,{2**31},44\n", 2, f"prompt tokens is {2**31}"),
        (f"{AZURE}\n2023-11-16 25:15:46,374,44\n", 2, "timestamp is '2023-11-16 25:15:46'"),
        ("Timestamp,Request tokens,Response tokens\nnan,3,4\n", 2, "timestamp is nan"),
        (mooncake() + "\n" + mooncake()[:-10], 2, "not JSON"),
        (mooncake() + "\n[1, 2]", 2, "not a JSON object"),
        (mooncake() + '\n{"input_length": 3}', 2, 'the field "timestamp" is missing'),
        (mooncake(input_length=1.5), 1, "input_length is 1.5"),
        (mooncake(input_length=True), 1, "input_length is True"),
        (mooncake(output_length=-1), 1, "output_length is -1"),
        (mooncake(timestamp="0"), 1, "timestamp is '0'"),
        (mooncake(timestamp=float("nan")), 1, "timestamp is nan"),
        (mooncake(timestamp=10**400), 1, "it must be a finite number"),
        ('{"input_length": 1' + "0" * 5000 + "}", 1, "not JSON"),
        (mooncake(hash_ids=[1, -2]), 1, "hash_ids must be a list of integers"),
        (mooncake(hash_ids=7), 1, "hash_ids must be a list of integers"),
        (
            mooncake(hash_ids=[1, 2, 3]),
            1,
            "3 hash_ids for 600 tokens; blocks of 512 tokens (Mooncake) have at most 2 ids, blocks of 16 (Qwen-Bailian)"
            " exactly 38; correct",
        ),
        (mooncake() + "\n" + mooncake(hash_ids=[1, 2, 3]), 2, "exactly 38; line 1 has 2 hash_ids for 600 tokens"),
        (
            qwen() + "\n" + qwen(hash_ids=[1]),
            2,
            "1 hash_ids for 40 tokens; blocks of 512 tokens (Mooncake) have",
        ),
        (qwen() + "\n" + qwen(hash_ids=[1]), 2, "of 16 (Qwen-Bailian) exactly 3; line 1 has 3 hash_ids for 40"),
        (
            qwen() + "\n" + mooncake(),
            2,
            'the lines before have a "chat_id" and this one has none: with "chat_id", timestamps',
        ),
        (mooncake() + "\n\n" + qwen(), 3, 'the lines before have no "chat_id" and this one has one'),
        (AZURE.encode() + b"\n2023-11-16 18:15:46,\xff,44\n", 2, "not UTF-8 text"),
    ],
)
def test_a_broken_line_is_reported_with_its_number(tmp_path: Path, text: str | bytes, line: int, wrong: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: ")
    assert wrong in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "\n\n", AZURE])
def test_a_trace_without_requests_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="the file has no request"):
        read_trace(write(tmp_path, text))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent.csv")


# ---------------------------------------------------------------------- tokens


def test_a_line_of_mooncake_may_have_a_retention(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]'
    path.write_text(f'{line}, "retention": 30}}\n{line}}}\n')
    assert [request.retention for request in read_trace(path)] == [30.0, None]
    for value in ("-1", '"long"', "1e999"):
        path.write_text(f'{line}, "retention": {value}}}\n')
        with pytest.raises(TraceError, match=r"line 1.*retention is"):
            read_trace(path)


def test_equal_hash_ids_at_the_same_place_give_equal_tokens() -> None:
    a = prompt_token_ids(TraceRequest(0.0, 1300, 1, (7, 8, 9)), 2048, seed=0, index=0)
    b = prompt_token_ids(TraceRequest(5.0, 1536, 9, (7, 8, 10)), 2048, seed=0, index=1)
    assert a.dtype == np.int32 and len(a) == 1300 and len(b) == 1536
    assert np.array_equal(a[:1024], b[:1024])
    assert np.mean(a[1024:] == b[1024:1300]) < 0.05
    shifted = prompt_token_ids(TraceRequest(0.0, 1024, 1, (8, 7)), 2048, seed=0, index=0)
    assert np.mean(shifted[:512] == a[512:1024]) < 0.05


def test_without_hash_ids_every_request_has_its_own_tokens() -> None:
    request = TraceRequest(0.0, 1000, 1)
    a, b = (prompt_token_ids(request, 2048, seed=0, index=index) for index in (0, 1))
    assert np.mean(a == b) < 0.05
    assert np.array_equal(a, prompt_token_ids(request, 2048, seed=0, index=0))
    assert np.mean(a == prompt_token_ids(request, 2048, seed=1, index=0)) < 0.05


def test_tokens_after_the_last_hash_id_are_not_shared() -> None:
    request = TraceRequest(0.0, 1000, 1, (5,))
    a, b = (prompt_token_ids(request, 50_000, seed=3, index=index) for index in (0, 1))
    assert np.array_equal(a[:512], b[:512])
    assert np.mean(a[512:] == b[512:]) < 0.05


def test_tokens_cover_the_vocabulary_evenly() -> None:
    tokens = prompt_token_ids(TraceRequest(0.0, 160_000, 1), 16, seed=0, index=0)
    counts = np.bincount(tokens, minlength=16)
    assert len(counts) == 16
    assert np.abs(counts - 10_000).max() < 500  # five standard deviations
    with pytest.raises(ValueError, match="vocab_size is 0"):
        prompt_token_ids(TraceRequest(0.0, 1, 1), 0, seed=0, index=0)


# ---------------------------------------------------------------------- the real files, where they are


@pytest.mark.parametrize(
    ("name", "count", "seconds"),
    [
        ("azure_llm_2023_conversation.csv", 19_366, (3400, 3700)),
        ("mooncake_synthetic.jsonl", 3_993, (950, 1100)),
        ("vllm_0.19_rtxpro6000_llama31_8b.jsonl", 300, (29, 30)),
    ],
)
def test_published_traces_are_read(name: str, count: int, seconds: tuple[int, int]) -> None:
    path = REAL_TRACES / name
    if not path.exists():
        pytest.skip(f"{name} is not in {REAL_TRACES}")
    requests = read_trace(path)
    assert len(requests) == count
    assert requests[0].arrival_time == 0.0
    assert seconds[0] < requests[-1].arrival_time < seconds[1]


def test_most_blocks_of_the_mooncake_trace_are_repeated() -> None:
    path = REAL_TRACES / "mooncake_synthetic.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {REAL_TRACES}")
    seen: set[bytes] = set()
    blocks = found = 0
    for index, request in enumerate(read_trace(path, limit=500)):
        tokens = prompt_token_ids(request, 128_000, seed=0, index=index)
        for at in range(0, len(tokens), 512):
            content = tokens[: at + 512].tobytes()
            blocks, found = blocks + 1, found + (content in seen)
            seen.add(content)
    ids = [i for request in read_trace(path, limit=500) for i in request.block_hash_ids]
    assert found == blocks - len(set(ids))
    assert found > 0


def test_compressed_files_and_sessions_are_refused_with_a_remedy(tmp_path: Path) -> None:
    session = '{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "in": 9, "out": 2}]}\n'
    with pytest.raises(TraceError, match=r'line 1: a session of a coding agent.*"input_length"'):
        read_trace(write(tmp_path, session * 2))
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(session.encode()))
    with pytest.raises(TraceError, match="line 1: the file is compressed with gzip; unpack it with gunzip"):
        read_trace(packed)
