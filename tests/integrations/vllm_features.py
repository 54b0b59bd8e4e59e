"""One feature of real vLLM, with its own scheduler or ours: a script for the environment with vLLM.

python vllm_features.py FEATURE ours|theirs MODEL FOLDER   prints one JSON line: the results to compare
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from prometheus_client import REGISTRY
from safetensors.numpy import save_file
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

OURS = "pointsman.integrations.vllm.Scheduler"
KNOBS = {
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
    "max_model_len": 512,
    "block_size": 32,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 40,
}
TEXTS = ["The import statement", "A class is", "def main():", "Functions may", "The import statement combines two"]


def knobs(ours: bool, **more: Any) -> dict[str, Any]:
    return {**KNOBS, **more, **({"scheduler_cls": OURS} if ours else {})}


def rounded(value: float) -> float:
    return round(value, 4)


def offline(ours: bool, model: str, folder: Path) -> Any:
    """The calls of one engine, one after the other."""
    endpoint = f"ipc://{folder}/events-{'ours' if ours else 'theirs'}"
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    llm = LLM(model, **knobs(ours, kv_events_config=config, num_gpu_blocks_override=200))
    return {"sampling": sampling(llm), "kv_events": kv_events(llm, endpoint)}


def sampling(llm: LLM) -> Any:
    """Several samples of a prompt, log probabilities of output and prompt, grammars."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, max_tokens=24, n=3, seed=7),
        SamplingParams(
            temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
        ),
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[0-9]{3,5}")),
        SamplingParams(temperature=0.0, max_tokens=40, min_tokens=20, stop=["the"], frequency_penalty=0.5),
    ]
    found = []
    for output in llm.generate(TEXTS, params, use_tqdm=False):
        logprobs = [
            [{token: rounded(entry.logprob) for token, entry in place.items()} for place in completion.logprobs]
            for completion in output.outputs
            if completion.logprobs is not None
        ]
        of_prompt = [
            {token: rounded(entry.logprob) for token, entry in place.items()}
            for place in output.prompt_logprobs or []
            if place is not None
        ]
        answers = [[each.text, list(each.token_ids), each.finish_reason, each.stop_reason] for each in output.outputs]
        found.append([answers, logprobs, of_prompt])
    return found


def drafts(ours: bool, model: str, folder: Path) -> Any:
    """N-gram drafts, more than the budget allows for all rows of a step; prompts that are cached up to their last
    token, with padded first rows."""
    speculation = {"method": "ngram", "num_speculative_tokens": 15, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    preset = {"additional_config": {"pointsman": {"socket": "", "preset": "vllm"}}} if ours else {}
    llm = LLM(model, **knobs(ours, speculative_config=speculation, num_gpu_blocks_override=200, **preset))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    rows: list[Any] = []
    schedule = scheduler.schedule

    def noted(*arguments: Any) -> Any:
        output = schedule(*arguments)
        names = {name: name.rpartition("-")[0] for name in output.num_scheduled_tokens}  # without a random part
        told = output.scheduled_spec_decode_tokens
        rows.append([[names[name], count, told.get(name, [])] for name, count in output.num_scheduled_tokens.items()])
        return output

    scheduler.schedule = noted
    prompts = [TokensPrompt(prompt_token_ids=[7 + number, 8, 9, 7, 8] * 13) for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = []
    for some in (prompts, prompts[:4], prompts):
        outputs = llm.generate(some, params, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert any(tokens and set(tokens) == {-1} for step in rows for _, _, tokens in step), "no row was padded"
    assert max(sum(count for _, count, _ in step) for step in rows) == KNOBS["max_num_batched_tokens"]
    # vLLM's own makes drafts beyond max_tokens, see vllm_decisions.py: the number in a row is not compared.
    return [found, [[[name, -1 in tokens] for name, _, tokens in step] for step in rows]]


def pooling(ours: bool, model: str, folder: Path) -> Any:
    """Embeddings, also of prompts that take several steps."""
    llm = LLM(model, runner="pooling", **knobs(ours))
    outputs = llm.embed([*TEXTS, " ".join(TEXTS * 8)], use_tqdm=False)
    return [[rounded(value) for value in output.outputs.embedding] for output in outputs]


def lora(ours: bool, model: str, folder: Path) -> Any:
    """Two adapters in one step; then one after the other, because only one fits a step.

    (No request runs without: vLLM 0.32 on a CPU gives such a row the last slot's adapter, whoever schedules it.)
    """
    found = []
    adapters = [LoRARequest(name, number, str(folder / name)) for number, name in enumerate(("one", "two"), start=1)]
    for max_loras in (2, 1):
        llm = LLM(model, **knobs(ours, enable_lora=True, max_loras=max_loras, max_lora_rank=8, max_cpu_loras=4))
        texts = TEXTS * 3
        requests = [adapters[number * number % 3 % 2] for number in range(len(texts))]
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        outputs = llm.generate(texts, params, use_tqdm=False, lora_request=requests)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        del llm
    return found


def make_adapters(model: str, folder: Path) -> None:
    """Two adapters of random weights, in the format of PEFT."""
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    for seed, name in enumerate(("one", "two")):
        rng = np.random.default_rng(seed)
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            for target, width in widths.items():
                path = f"base_model.model.model.layers.{layer}.self_attn.{target}"
                weights[f"{path}.lora_A.weight"] = rng.standard_normal((8, hidden), dtype=np.float32) * 0.2
                weights[f"{path}.lora_B.weight"] = rng.standard_normal((width, 8), dtype=np.float32) * 0.2
        (folder / name).mkdir()
        save_file(weights, folder / name / "adapter_model.safetensors")
        described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none"}
        described |= {"target_modules": list(widths), "base_model_name_or_path": model}
        (folder / name / "adapter_config.json").write_text(json.dumps(described))


def online(ours: bool, model: str, folder: Path) -> Any:
    """The calls of one asynchronous engine, one after the other."""

    async def both() -> Any:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **knobs(ours)))
        try:
            streamed = await asyncio.wait_for(sessions(engine), 60)
            paused = await asyncio.wait_for(pauses(engine), 60)
            return {"sessions": streamed, "pauses": paused, "metrics": metrics()}
        finally:
            engine.shutdown()

    return asyncio.run(both())


def metrics() -> Any:
    """The names and labels of the Prometheus metrics, without values."""
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return sorted([sample.name, sorted(sample.labels.items())] for sample in samples if "vllm:" in sample.name)


async def generate(engine: AsyncLLM, prompt: Any, name: str, max_tokens: int) -> list[int]:
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    tokens: list[int] = []
    async for output in engine.generate(prompt, params, name):
        tokens += output.outputs[0].token_ids
    return tokens


async def sessions(engine: AsyncLLM) -> Any:
    """Prompts in parts, two sessions beside other requests."""

    async def parts(number: int) -> AsyncIterator[Any]:
        for at in range(3):
            yield StreamingInput(TokensPrompt(prompt_token_ids=[5 + number + at] * (20 + 30 * at)))
            await asyncio.sleep(0.2 * number)

    plain = [generate(engine, TokensPrompt(prompt_token_ids=[9] * 30), f"plain-{n}", 40) for n in range(4)]
    streamed = [generate(engine, parts(number), f"session-{number}", 10) for number in range(2)]
    return await asyncio.gather(*plain, *streamed)


async def pauses(engine: AsyncLLM) -> Any:
    """Requests that run during a pause, a reset of the caches and a resume end normally."""
    asked = [
        asyncio.ensure_future(generate(engine, text, f"paused-{number}", 300)) for number, text in enumerate(TEXTS)
    ]
    await asyncio.sleep(0.3)
    await engine.pause_generation(mode="keep", clear_cache=False)
    assert await engine.is_paused()
    done_before = sum(task.done() for task in asked)
    await engine.reset_prefix_cache(reset_running_requests=True)
    await asyncio.sleep(0.3)
    assert sum(task.done() for task in asked) == done_before < len(asked)
    await engine.resume_generation()
    return await asyncio.gather(*asked)


def kv_events(llm: LLM, endpoint: str) -> Any:
    """A subscriber's view of the final prefix cache: token sequences, and their hashes."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)
    time.sleep(0.5)
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    llm.generate([" ".join(TEXTS * times) for times in (1, 3, 3, 6)], params, use_tqdm=False)
    llm.reset_prefix_cache()
    llm.generate([" ".join(TEXTS * times) for times in (2, 4)], params, use_tqdm=False)
    llm.generate(["."], SamplingParams(max_tokens=2), use_tqdm=False)  # a step reports the rest of the events
    known: dict[int, list[int]] = {}
    num_cleared = 0
    while socket.poll(1000):
        _, _, payload = socket.recv_multipart()
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            if isinstance(event, AllBlocksCleared):
                known.clear()
                num_cleared += 1
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del known[name]
            else:
                before = known[event.parent_block_hash] if event.parent_block_hash is not None else []
                for at, name in enumerate(event.block_hashes, start=1):
                    known[name] = before + event.token_ids[: at * event.block_size]
    return [num_cleared, sorted([tokens, name] for name, tokens in known.items())]


def main() -> None:
    feature, whose, model, folder = sys.argv[1:]
    if feature == "adapters":
        make_adapters(model, Path(folder))
        return
    if feature != "online":  # calls from one thread need no separate engine process
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    features = {each.__name__: each for each in (offline, online, pooling, lora, drafts)}
    print(json.dumps(features[feature](whose == "ours", model, Path(folder))))


if __name__ == "__main__":
    main()
