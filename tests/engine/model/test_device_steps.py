"""Steps as a GPU runs them, on the CPU: Triton's kernels are interpreted, and a graph is the same calls once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.attention.triton_backend import TritonAttention
from pointsman.engine.model.decode_graphs import bucket_sizes
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from tests.engine.engine_loop import drain, free_blocks
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build
from tests.triton_interpreter import quick_calls


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with quick_calls():
        yield


class Again:
    """In place of CUDA graphs: does again what was recorded, over the same memory."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Of one layer, as the interpreter is slow, and with its own code between the attention."""
    config = FAMILIES["qwen3"]()
    config.num_hidden_layers = 1
    return wrap_model(build(config, seed=1), tokenizer=byte_tokenizer(), attention="torch", fuse=False)


def make(
    loaded: LoadedModel, attention: Any = TritonAttention, *, steps: int = 1, graphs: Again | None = None, **knobs: Any
) -> Engine:
    knobs = {"num_blocks": 48, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, **knobs}
    engine = Engine(loaded, attention=attention, max_steps_in_flight=steps, **knobs)
    if graphs is not None:
        engine.runner.record_graphs(1 << 30, lambda: 0, graphs)
        graphs.num_replays = 0
    return engine


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "top_p": 0.8, "seed": 4},
    {"temperature": 0.7, "top_k": 7, "min_p": 0.02, "seed": 5},
]
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
]


def texts(engine: Engine, params: list[dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    for number, one in enumerate(params):
        prompt = [3 + (7 * number + 3 * at) % 150 for at in range(3 + 6 * number)]
        engine.add_request(f"r{number}", prompt, SamplingParams(max_tokens=4 + number, ignore_eos=True, **one))
    found = {request_id: tuple(output.token_ids) for request_id, output in drain(engine).items()}
    assert free_blocks(engine) == engine.scheduler.config.num_blocks
    return found


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("with_graphs", [False, True])
def test_tokens_are_those_of_plain_pytorch(loaded: LoadedModel, steps: int, with_graphs: bool) -> None:
    graphs = Again() if with_graphs else None
    want = texts(make(loaded, "torch"), [*SAMPLING, *OTHERS])
    assert texts(make(loaded, steps=steps, graphs=graphs), [*SAMPLING, *OTHERS]) == want
    assert graphs is None or graphs.num_replays > 5


def test_every_number_of_rows_has_a_graph_of_few_more() -> None:
    assert bucket_sizes(3) == [1, 2, 3] and bucket_sizes(8) == [1, 2, 4, 8]
    sizes = bucket_sizes(1024)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24] and sizes[-3:] == [480, 496, 512] and len(sizes) == 39
