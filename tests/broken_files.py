"""Gives every reader of files broken copies of a valid file, in a process that limits time and memory.

    python -m tests.broken_files READER[,READER...] FIRST LAST [--show]

reads the mutations FIRST to LAST - 1 (`tests/mutations.py`) and prints a JSON object for each reader: the numbers of
accepted and refused mutations, the longest time, the largest memory, and the failures. A reader passes if it accepts
the file or raises its documented error, whose one line names the file; a command passes if it prints such an error and
ends with an exit code. `--show` prints every error too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pointsman.cli.errors import CommandError
from tests.mutations import Structure, mutated

MAX_SECONDS = 10.0
MAX_BYTES = 10**9
MAX_MESSAGE = 2_000
"""Maximum number of characters of an error message."""
MAX_FAILURES = 30
RECORDINGS = Path(__file__).parent / "core" / "recordings"


@dataclass(frozen=True)
class Reader:
    """A reader of a file format.

    Args:
        structure: structure of the file, as `mutated` takes it.
        make: function that writes a valid file into a folder and returns the path.
        read: function that reads the file at a path, valid or broken.
        errors: names ("package.module:Name") of its allowed errors.
        place: a pattern that every error must match beside the file's name.
        names_file: whether errors name the file; otherwise their caller adds it.
    """

    structure: Structure
    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    errors: tuple[str, ...]
    place: str = ""
    names_file: bool = True


@dataclass
class Found:
    accepted: int = 0
    refused: int = 0
    longest_seconds: float = 0.0
    slowest: int = -1
    peak_megabytes: int = 0
    """Maximum memory of a reader, beyond that of the process before the first mutation."""
    failures: list[str] = field(default_factory=list)


# ---------------------------------------------------------------------- valid files


def _text(name: str, text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


def _jsonl(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + at}.6805900,{10 + at},{5 + at}\n" for at in range(6)
)
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{at},ChatGPT,{10 + at},{5 + at},{15 + 2 * at},Conversation log\n" for at in range(6)
)
MOONCAKE = _jsonl(
    *(
        {
            "timestamp": 100 * at,
            "input_length": 1000 + at,
            "output_length": 5,
            "hash_ids": [0, at + 1],
            "retention": 3.0,
        }
        for at in range(6)
    )
)
QWEN = _jsonl(
    *(
        {"chat_id": at, "timestamp": at, "input_length": 30, "output_length": 5, "hash_ids": [0, at + 1]}
        for at in range(6)
    )
)


def _measured_lines(number: int = 6) -> str:
    return _jsonl(
        *(
            {
                "request_id": f"r{at}",
                "input_toks": 10 + 7 * at,
                "output_toks": 5 + at % 4,
                "arrival_time": 7.0 + at,
                "queued_ts": 100.0 + at,
                "scheduled_ts": 100.5 + at,
                "first_token_ts": 101.0 + at,
                "last_token_ts": 102.0 + at + 0.1 * (at % 4),
            }
            for at in range(number)
        )
    )


VLLM_BENCH = json.dumps(
    {
        "date": "20261124-120000",
        "endpoint_type": "vllm",
        "request_rate": "inf",
        "max_concurrency": None,
        "input_lens": [100, 50, 70],
        "output_lens": [3, 0, 1],
        "ttfts": [0.5, 0.0, 0.25],
        "itls": [[0.125, 0.25], [], []],
        "start_times": [1000.0, 1000.5, 999.0],
        "generated_texts": ['a "text" ]}', "", "b"],
        "errors": ["", "failed", ""],
    }
)


def _guidellm() -> str:
    def request(start: float, tokens: int) -> dict[str, Any]:
        timings = {"request_start": start, "first_token_iteration": start + 1, "last_token_iteration": start + 2}
        return {"request_id": "r", "info": {"timings": timings}, "prompt_tokens": tokens, "output_tokens": 5}

    requests = {"successful": [request(20.0, 100), request(10.0, 60)], "errored": [request(30.0, 5)], "total": None}
    one = {"metrics": {"request_totals": {"successful": 2}}, "requests": requests}
    return json.dumps({"metadata": {"version": 2}, "config": {}, "benchmarks": [one]})


def _copy(name: str) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copy(RECORDINGS / name, folder / name))


def _timed_recording(folder: Path) -> Path:
    """A recording whose steps have times."""
    path = folder / "timed.jsonl"
    lines = [json.loads(line) for line in (RECORDINGS / "plain.jsonl").read_text().splitlines()]
    for line in lines:
        if line.get("call") == "update":
            line["step_time"] = 1e-3 + 1e-4 * len(line["token_ids"])
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def _observed(folder: Path) -> Path:
    from tests.sim.observed_logs import observed_lines, write_observed

    return write_observed(folder / "observed.jsonl", observed_lines(12))


def _film(folder: Path) -> Path:
    from pointsman.cli.film import film_recording

    path = folder / "run.film"
    with path.open("wb") as file:
        film_recording(RECORDINGS / "plain.jsonl", file)
    return path


def _profile(folder: Path) -> Path:
    from pointsman.sim.hull import Hull
    from pointsman.sim.profile import EngineSettings, Profile
    from pointsman.sim.step_time import LinearStepTime, StepLoad

    hull = Hull.of_loads([StepLoad(10, 1, 10, 10, 1), StepLoad(512, 8, 4000, 9000, 8)])
    settings = EngineSettings(max_num_seqs=24, max_num_batched_tokens=512)
    made = Profile(
        step_time=LinearStepTime(per_step=1e-3),
        settings=settings,
        hull=hull,
        source="log.jsonl",
        kind="requests",
        num_requests=30,
        num_train=15,
    )
    made.save(folder / "profile.json")
    return folder / "profile.json"


SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def _model(name: str) -> Callable[[Path], Path]:
    """A tiny model with every file, its weights in two; the reader reads the file of that name."""

    def make(folder: Path) -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        from tests.engine.text_tokenizers import byte_level
        from tests.engine.tiny_models import FAMILIES

        torch.manual_seed(0)
        path = folder / "model"
        model = AutoModelForCausalLM.from_config(FAMILIES["qwen3"]())
        shards = name.startswith("model.safetensors.index")
        model.save_pretrained(path, max_shard_size="60KB" if shards else "5GB")
        tokenizer = byte_level()
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        tokenizer.save_pretrained(path)
        return path / name

    return make


def _gguf(folder: Path) -> Path:
    """A tiny model with a tokenizer, in 8 bits."""
    from gguf import GGMLQuantizationType

    from tests.engine.gguf_files import add_tokenizer, trained_bpe, write_gguf
    from tests.engine.tiny_models import FAMILIES, build

    config = FAMILIES["qwen3"]()
    config.hidden_size, config.vocab_size = 64, 300
    tokenizer = trained_bpe(config.vocab_size)
    edit = add_tokenizer(tokenizer, "gpt2", pre="qwen2", num_tokens=config.vocab_size)
    return write_gguf(folder / "model.gguf", build(config), kind=GGMLQuantizationType.Q8_0, edit=edit)


YAML = """# of the server
model: demo
host: 127.0.0.1
port: 8000
max-num-seqs: 48
served_model_name: [qwen3, "default"]
max_num_batched_tokens: 512
chat_template:
order: fcfs
enable_prefix_caching: true
max_request_bytes: 16MiB
"""
KEYS = "team-a:key-one\nteam-b:key-two\n\nkey-three\n"
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}{% endfor %}"
PROMPTS = _jsonl(
    {"request_id": "a", "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0.5, "stop": ["x"]},
    {"prompt_token_ids": [1, 2, 3], "priority": 1, "tenant": "t", "ttft_target": 2.0, "retention": 3.0},
    {"prompt": "two", "logit_bias": {"5": 1.0}, "allowed_token_ids": [1, 2], "top_p": 0.9, "seed": 7},
)

# ---------------------------------------------------------------------- what reads them


def _read_trace(path: Path) -> object:
    from pointsman.traces import read_trace

    return read_trace(path)


def _read_measurements(path: Path) -> object:
    from pointsman.traces import read_measurements

    return read_measurements(path)


def _read_observed(path: Path) -> object:
    from pointsman.traces import read_observed

    return read_observed(path)


def _read_steps(path: Path) -> object:
    from pointsman.sim.step_log import read_steps

    return read_steps(path)


def _load_profile(path: Path) -> object:
    from pointsman.sim.profile import load_profile

    return load_profile(path)


def _model_shape(path: Path) -> object:
    from pointsman.sim.shapes import model_shape

    return model_shape(path)


def _replay(path: Path) -> object:
    from pointsman.core import replay
    from pointsman.files import read_text_lines

    with path.open("rb") as file:
        return replay(read_text_lines(file))


def _read_film(path: Path) -> object:
    from pointsman.web.film import Film

    film = Film.read(path)
    return [sum(1 for _ in film.events(0, None)), *(film.state_at(index) for index in (0, len(film.frames) - 1))]


def _read_yaml(path: Path) -> object:
    from pointsman.cli.serve import serve_settings

    return serve_settings({}, str(path), {})


def _read_keys(path: Path) -> object:
    from pointsman.cli.serve import serve_settings

    return serve_settings({"api_key_file": str(path)}, None, {})


def _read_template(path: Path) -> object:
    from pointsman.cli.serve import serve_settings
    from pointsman.server.serve import check_chat_template

    settings = serve_settings({"chat_template": str(path)}, None, {})
    try:
        check_chat_template(settings.server.chat_template or "", None)
    except ValueError as error:
        raise CommandError(settings.message_with_place(error)) from None
    return settings


def _read_prompts(path: Path) -> object:
    from pointsman.cli.workload import Sampling, prompts_workload

    sampling = Sampling(max_tokens=5, temperature=1.0, top_p=1.0, top_k=0, ignore_eos=False, stop=())
    return prompts_workload(str(path), sampling)


def _load_model(path: Path) -> object:
    from pointsman.engine.model.loader import load_model

    return load_model(path.parent)


def _read_tokenizer(path: Path) -> object:
    """Read the file as the API process does."""
    from pointsman.engine.text.tokenizer import encode, read_tokenizer

    tokenizer = read_tokenizer(path.parent)
    return tokenizer and tokenizer.decode(encode(tokenizer, "the éx"))


def _load_gguf(path: Path) -> object:
    from pointsman.engine.model.loader import load_model

    return load_model(path)


def _read_gguf_tokenizer(path: Path) -> object:
    from pointsman.engine.text.tokenizer import encode, read_tokenizer

    tokenizer = read_tokenizer(path)
    return tokenizer and tokenizer.decode(encode(tokenizer, "the éx"))


def _command(*arguments: str) -> Callable[[Path], object]:
    """`pointsman` in this process, with the path in place of FILE."""

    def run(path: Path) -> object:
        from pointsman.cli import main

        given = [argument.replace("FILE", str(path)) for argument in arguments]
        out, err = io.StringIO(), io.StringIO()
        code: Any = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(given)
            except SystemExit as ended:
                code = ended.code
        if code == 0:
            return out.getvalue()
        said = [line for line in err.getvalue().splitlines() if "warning" not in line]
        if code == 1 and str(path) in out.getvalue():
            raise CommandError(out.getvalue().splitlines()[0])
        if code not in (1, 2) or len(said) != 1:
            raise AssertionError(f"exit code {code}, with {said} on stderr")
        raise CommandError(said[0])

    return run


_TRACE = ("pointsman.traces:TraceError",)
_MODEL = ("pointsman.engine.errors:ModelLoadError",)
_COMMAND = ("pointsman.cli.errors:CommandError",)
_LINE = r"line \d+|request "
# The command adds the file's name to a recording's errors.
_REPLAYED = ("pointsman.core:RecordingError", "pointsman.core:ReplayDifference", "builtins:ValueError")

READERS: dict[str, Reader] = {
    "trace-azure": Reader("lines", _text("azure.csv", AZURE), _read_trace, _TRACE, _LINE),
    "trace-burstgpt": Reader("lines", _text("burst.csv", BURSTGPT), _read_trace, _TRACE, _LINE),
    "trace-mooncake": Reader("json-lines", _text("mooncake.jsonl", MOONCAKE), _read_trace, _TRACE, _LINE),
    "trace-qwen": Reader("json-lines", _text("qwen.jsonl", QWEN), _read_trace, _TRACE, _LINE),
    "trace-measured": Reader("json-lines", _text("log.jsonl", _measured_lines()), _read_trace, _TRACE, _LINE),
    "trace-recording": Reader("json-lines", _copy("drafts.jsonl"), _read_trace, _TRACE, _LINE),
    "trace-observed": Reader("json-lines", _observed, _read_trace, _TRACE, _LINE),
    "times-measured": Reader("json-lines", _text("log.jsonl", _measured_lines()), _read_measurements, _TRACE),
    "times-vllm-bench": Reader("json", _text("bench.json", VLLM_BENCH), _read_measurements, _TRACE),
    "times-guidellm": Reader("json", _text("guidellm.json", _guidellm()), _read_measurements, _TRACE),
    "times-recording": Reader("json-lines", _copy("plain.jsonl"), _read_measurements, _TRACE),
    "observed": Reader("json-lines", _observed, _read_observed, _TRACE, _LINE),
    "steps": Reader(
        "json-lines", _timed_recording, _read_steps, ("pointsman.sim.errors:CalibrationError",), r"line \d+|step_time"
    ),
    "steps-observed": Reader(
        "json-lines", _observed, _read_steps, ("pointsman.sim.errors:CalibrationError", *_TRACE), r"line \d+|step"
    ),
    "profile": Reader("json", _profile, _load_profile, ("pointsman.sim.errors:CalibrationError",)),
    "shape": Reader(
        "json", _text("config.json", json.dumps(SHAPE)), _model_shape, ("pointsman.sim.errors:UnsupportedModel",)
    ),
    **{
        f"replay-{name}": Reader(
            "json-lines", _copy(f"{name}.jsonl"), _replay, _REPLAYED, r"line \d+|empty", names_file=False
        )
        for name in ("plain", "connector", "drafts")
    },
    "film": Reader("binary", _film, _read_film, ("pointsman.core.observe.film_format:FilmError",), names_file=False),
    "yaml": Reader("lines", _text("serve.yaml", YAML), _read_yaml, _COMMAND),
    "keys": Reader("lines", _text("keys.txt", KEYS), _read_keys, _COMMAND),
    "chat-template": Reader("lines", _text("chat.jinja", TEMPLATE), _read_template, _COMMAND),
    "prompts": Reader("json-lines", _text("prompts.jsonl", PROMPTS), _read_prompts, _COMMAND),
    "model-config": Reader("json", _model("config.json"), _load_model, _MODEL),
    "model-generation": Reader("json", _model("generation_config.json"), _load_model, _MODEL),
    "model-weights": Reader("safetensors", _model("model.safetensors"), _load_model, _MODEL),
    "model-index": Reader("json", _model("model.safetensors.index.json"), _load_model, _MODEL),
    "model-tokenizer": Reader("json", _model("tokenizer.json"), _read_tokenizer, _MODEL),
    "model-tokenizer-config": Reader("json", _model("tokenizer_config.json"), _read_tokenizer, _MODEL),
    "model-gguf": Reader("gguf", _gguf, _load_gguf, _MODEL),
    "model-gguf-tokenizer": Reader("gguf", _gguf, _read_gguf_tokenizer, _MODEL),
    "command-replay": Reader("json-lines", _copy("drafts.jsonl"), _command("replay", "FILE"), _COMMAND),
    "command-film": Reader("binary", _film, _command("film", "FILE", "--step", "3"), _COMMAND),
    "command-film-recording": Reader(
        "json-lines", _copy("plain.jsonl"), _command("film", "FILE", "--out", "FILE.film"), _COMMAND
    ),
    "command-plot": Reader("binary", _film, _command("plot", "FILE", "--out", "FILE.svg"), _COMMAND),
    "command-simulate-trace": Reader(
        "json-lines", _text("mooncake.jsonl", MOONCAKE), _command("simulate", "--trace", "FILE", "--json"), _COMMAND
    ),
    "command-simulate-model": Reader(
        "json",
        _text("config.json", json.dumps(SHAPE)),
        _command("simulate", "--model", "FILE", "--requests", "5", "--json"),
        _COMMAND,
        names_file=False,  # a model that does not fit, for example
    ),
    "command-simulate-profile": Reader(
        "json",
        _profile,
        _command("simulate", "--profile", "FILE", "--requests", "5", "--json"),
        _COMMAND,
        names_file=False,  # settings under which every request is refused, for example
    ),
    "command-calibrate": Reader(
        "json-lines", _timed_recording, _command("calibrate", "FILE", "--output", "FILE.profile"), _COMMAND
    ),
    "command-compare": Reader("json-lines", _observed, _command("vllm", "compare", "FILE", "--json"), _COMMAND),
}

# ---------------------------------------------------------------------- watched


class TooSlow(BaseException):
    """Raised in the reader by the timer."""


class TooMuchMemory(BaseException):
    """Raised in the reader by the memory watch."""


def read_mutations(name: str, numbers: range, *, show: bool = False) -> Found:
    """Give a reader the mutations of these numbers, one after the other."""
    reader, found = READERS[name], Found()
    errors = tuple(_named(each) for each in reader.errors)
    with tempfile.TemporaryDirectory() as folder:
        path = reader.make(Path(folder))
        data = path.read_bytes()
        reader.read(path)  # the valid file; also, everything is imported now
        with _watched() as watch:
            for index in numbers:
                path.write_bytes(mutated(data, reader.structure, index))
                faulthandler.dump_traceback_later(6 * MAX_SECONDS, exit=True)
                print(f"{name} {index}", file=sys.stderr, flush=True)
                began = time.perf_counter()
                problem: str | None = None
                try:
                    with watch():
                        reader.read(path)
                    found.accepted += 1
                except errors as error:
                    found.refused += 1
                    problem = _wrong(str(error), path, reader)
                    if show:
                        print(f"{index}: {error}", file=sys.stderr)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    where = traceback.extract_tb(error.__traceback__)
                    frames = [f"{Path(each.filename).name}:{each.lineno}" for each in where[-6:]]
                    problem = f"{type(error).__name__}: {str(error)[:300]} at {' '.join(frames)}"
                taken = time.perf_counter() - began
                if taken > found.longest_seconds:
                    found.longest_seconds, found.slowest = taken, index
                if problem is None and taken > MAX_SECONDS:
                    problem = f"it took {taken:.1f} s"
                if problem is not None:
                    found.failures.append(f"{name} {index}: {problem}")
            faulthandler.cancel_dump_traceback_later()
            found.peak_megabytes = watch.peak // 10**6
    return found


def _wrong(message: str, path: Path, reader: Reader) -> str | None:
    """The fault of an error, in words."""
    if "\n" in message.strip() or "Traceback" in message:
        return f"an error of several lines: {message[:300]!r}"
    if len(message) > MAX_MESSAGE:
        return f"an error of {len(message)} characters: {message[:300]!r}"
    if reader.names_file and path.name not in message and str(path.parent) not in message:
        return f"an error without the file's name: {message[:300]!r}"
    if reader.place and not re.search(reader.place, message):
        return f"an error without a place: {message[:300]!r}"
    return None


def _named(error: str) -> type[BaseException]:
    module, _, name = error.partition(":")
    found: type[BaseException] = getattr(__import__(module, fromlist=[name]), name)
    return found


class _Watch:
    """A context that interrupts a reader that takes too long or too much memory."""

    def __init__(self) -> None:
        self.base = _resident()
        self.peak = 0
        self.is_over = False
        self._is_reading = False
        threading.Thread(target=self._look, daemon=True).start()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_REAL, 2 * MAX_SECONDS)
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _look(self) -> None:
        while not self.is_over:
            self.peak = max(self.peak, _resident() - self.base)
            if self.peak > MAX_BYTES and self._is_reading:
                self._is_reading, self.peak = False, 0
                signal.raise_signal(signal.SIGUSR1)
            time.sleep(0.01)


@contextlib.contextmanager
def _watched() -> Iterator[_Watch]:
    def too_slow(number: int, frame: object) -> None:
        raise TooSlow(f"more than {2 * MAX_SECONDS:.0f} s")

    def too_large(number: int, frame: object) -> None:
        raise TooMuchMemory(f"more than {MAX_BYTES:,} bytes")

    signal.signal(signal.SIGALRM, too_slow)
    signal.signal(signal.SIGUSR1, too_large)
    # A single huge allocation fails at this limit, before the machine's memory is exhausted.
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, resource.RLIM_INFINITY))
    watch = _Watch()
    try:
        yield watch
    finally:
        watch.is_over = True


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> None:
    names, first, last = arguments[:3]
    for name in names.split(","):
        found = read_mutations(name, range(int(first), int(last)), show="--show" in arguments)
        num_failures = len(found.failures)
        found.failures = found.failures[:MAX_FAILURES]
        print(f"\n{json.dumps({'name': name, 'num_failures': num_failures, **asdict(found)})}")


if __name__ == "__main__":
    main(sys.argv[1:])
