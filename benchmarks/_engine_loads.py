"""Loads on real weights, from one request to many at once: the part of `engine_throughput.py` with `--model`.

There are three comparisons, each a contest of its own. In float32 and in bfloat16 Pointsman is compared with engines
that compute in the same dtype. The third comparison has the variants of Pointsman beside llama.cpp, on the same GGUF
file. llama.cpp keeps the file's types, and quantises activations to 8 bits. It also runs with types that are faster for
it. Those weights are converted from the file's own, so they are less exact.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from _common import Targets, finish, note, print_table
from _engine_contest import (
    LLAMA_CPP,
    POINTSMAN,
    SLOTS,
    TRANSFORMERS_CONTINUOUS,
    TRANSFORMERS_STATIC,
    VLLM_COMPILED,
    VLLM_EAGER,
    Contender,
    Contestant,
    check_agreement,
    chosen,
    compete,
    rounded,
    without_missing,
)
from _engine_real_model import RealModel
from _engine_worker import FIRST_TOKENS

from pointsman.engine.errors import ModelLoadError

LOADS, OUTPUT = (1, 4, 8, 16, 64), 128
QUICK_LOADS, QUICK_OUTPUT = (1, 4, 8), 32
OURS = {
    "pointsman-float32": POINTSMAN,
    "pointsman-bfloat16": replace(POINTSMAN, dtype="bfloat16"),
    "pointsman-int8": replace(POINTSMAN, options={"quantization": "int8"}),
    "pointsman-int4": replace(POINTSMAN, dtype="bfloat16", options={"quantization": "int4"}),
}
QUANTIZED = "pointsman-int4"
"""The contender with targets beside llama.cpp on the file itself."""
PEERS = {
    # All outputs are equally long, so a static batch of all requests wastes nothing.
    "transformers-static": replace(TRANSFORMERS_STATIC, options=TRANSFORMERS_STATIC.options | {"batch_size": SLOTS}),
    "transformers-continuous": TRANSFORMERS_CONTINUOUS,
    "vllm-eager": VLLM_EAGER,
    "vllm-compiled": VLLM_COMPILED,
}


def of_dtype(dtype: str) -> dict[str, Contender]:
    """Pointsman and its peers in one dtype."""
    peers = {name: replace(peer, dtype=dtype) for name, peer in PEERS.items()}
    return {f"pointsman-{dtype}": OURS[f"pointsman-{dtype}"], **peers}


COMPARISONS = {
    "float32": of_dtype("float32"),
    "bfloat16": of_dtype("bfloat16"),
    "quantized": {
        **OURS,
        "llama.cpp": LLAMA_CPP,
        "llama.cpp-q8_0": replace(LLAMA_CPP, options={"type": "Q8_0"}),
        "llama.cpp-q4_0": replace(LLAMA_CPP, options={"type": "Q4_0"}),
    },
}
TABLES = {
    "output tokens per second": "output_tokens_per_second",
    "TTFT, seconds, median": "first_token_seconds",
    "peak resident memory, MiB": "peak_mebibytes",
    "processor seconds": "cpu_seconds",
}


def min_ratio(ours: str, peer: str, load: int) -> float | None:
    """The target for the peer's seconds / ours; None: there is none."""
    if peer in PEERS:
        return 1.0
    if (ours, peer) != (QUANTIZED, "llama.cpp"):
        return None
    return 1.0 if load < 4 else 1.5 if load < 8 else 2.5


def measure(arguments: argparse.Namespace) -> int:
    """Run the comparisons; the exit code."""
    loads = arguments.requests or (QUICK_LOADS if arguments.quick else LOADS)
    try:
        workload = RealModel(arguments.model, loads, QUICK_OUTPUT if arguments.quick else OUTPUT)
    except ModelLoadError as error:
        raise SystemExit(str(error)) from None
    comparisons = chosen_comparisons(arguments, workload)
    targets = Targets()
    figures = {name: report(name, contenders, workload, arguments, targets) for name, contenders in comparisons.items()}
    for name in COMPARISONS:
        if name not in comparisons:
            targets.skip(f"{name}: every peer / Pointsman, seconds", "not chosen, or no peer is there")
    setting = {
        "model": arguments.model,
        "quick": arguments.quick,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "output_tokens_per_request": workload.requests(loads[0], 0).outputs[0],
        "prompt_tokens": {load: sum(map(len, workload.requests(load, 0).prompts)) for load in loads},
    }
    return finish("engine_throughput", {**setting, **figures}, targets, arguments.check)


def chosen_comparisons(arguments: argparse.Namespace, workload: RealModel) -> dict[str, dict[str, Contender]]:
    """The chosen comparisons, with the contenders that can run: at least one of ours, and a peer.

    Raises:
        SystemExit: there is no such comparison.
    """
    names = chosen(arguments.contenders, {name: None for contenders in COMPARISONS.values() for name in contenders})
    dtype = arguments.dtype or ("quantized" if arguments.quick else "all")
    comparisons = COMPARISONS if dtype == "all" else {dtype: COMPARISONS[dtype]}
    if not workload.is_gguf and "quantized" in comparisons:
        note("skipped: llama.cpp, it reads only GGUF files")
        comparisons = {name: contenders for name, contenders in comparisons.items() if name != "quantized"}
    wanted = {name: contender for contenders in comparisons.values() for name, contender in contenders.items()}
    there = without_missing({name: contender for name, contender in wanted.items() if name in names})
    found = {
        comparison: {name: contender for name, contender in contenders.items() if name in there}
        for comparison, contenders in comparisons.items()
    }
    found = {name: some for name, some in found.items() if len({one.is_ours for one in some.values()}) == 2}
    if not found:
        raise SystemExit(
            "--contenders has nothing to compare: give one of Pointsman's contenders and a peer of its dtype"
        )
    return found


def report(
    name: str,
    contenders: Mapping[str, Contender],
    workload: RealModel,
    arguments: argparse.Namespace,
    targets: Targets,
) -> dict[str, Any]:
    """One comparison: tables, figures, targets."""
    note(f"\n{name}: loading and warming up")
    contestants = compete(contenders, workload, arguments.threads, arguments.rounds)
    loads = workload.loads
    figures = {one.name: figures_of(one, contestants[0], workload) for one in contestants}
    about = f"{name}, {workload.path.name}, {arguments.threads} thread(s), {arguments.rounds} round(s)"
    header = ["requests at once", *map(str, loads)]
    for title, figure in TABLES.items():
        rows = [[one, *(of["loads"].get(load, {}).get(figure) for load in loads)] for one, of in figures.items()]
        print_table(f"{title}: {about}", header, rows)
    rows = [[one, of["first_answer_seconds"], of["agreement"]] for one, of in figures.items()]
    print_table(f"the process: {about}", ["", "seconds to first answer", f"same {FIRST_TOKENS} tokens"], rows)
    ratios = ratios_of(contestants, loads)
    rows = [[pair, *(of.get(load) for load in loads)] for pair, of in ratios.items()]
    print_table(f"a peer's seconds / Pointsman's: {about}", header, rows)
    check_ratios(name, contenders, loads, ratios, arguments.quick, targets)
    if name == "float32":
        check_agreement(contestants, targets)
    return {**figures, "ratios": ratios}


def figures_of(one: Contestant, reference: Contestant, workload: RealModel) -> dict[str, Any]:
    """The figures of one contender."""
    return {
        "first_answer_seconds": rounded(one.first_answer_seconds),
        "agreement": None if one is reference else rounded(one.agreement(reference)),
        "loads": {
            load: {
                "rounds": len(turns),
                "output_tokens_per_second": rounded(
                    workload.requests(load, 0).num_output_tokens / one.seconds(load), 2
                ),
                "first_token_seconds": rounded(one.middle(load, "first_token")),
                "peak_mebibytes": rounded(one.middle(load, "peak_mebibytes"), 1),
                "cpu_seconds": rounded(one.middle(load, "cpu_seconds"), 2),
            }
            for load, turns in one.turns.items()
        },
    }


def ratios_of(contestants: Sequence[Contestant], loads: Sequence[int]) -> dict[str, dict[int, float | None]]:
    """Each peer's seconds / those of each of ours, by load."""
    return {
        pair(peer.name, ours.name): {load: rounded(peer.ratio(load, ours)) for load in loads}
        for ours in contestants
        if ours.contender.is_ours
        for peer in contestants
        if not peer.contender.is_ours
    }


def pair(peer: str, ours: str) -> str:
    return f"{peer} / {ours}"


def check_ratios(
    comparison: str,
    contenders: Mapping[str, Contender],
    loads: Sequence[int],
    ratios: Mapping[str, Mapping[int, float | None]],
    quick: bool,
    targets: Targets,
) -> None:
    """Check the ratios against the targets; failed contenders are named."""
    for ours in (name for name, one in contenders.items() if one.is_ours):
        for peer in (name for name, one in contenders.items() if not one.is_ours):
            for load in loads:
                least = min_ratio(ours, peer, load)
                if least is None:
                    continue
                text = f"{comparison}: {pair(peer, ours)}, seconds, {load} at once"
                ratio = ratios.get(pair(peer, ours), {}).get(load)
                if quick:
                    targets.skip(text, "--quick")
                elif ratio is None:
                    targets.skip(text, f"{peer} did not run")
                else:
                    targets.at_least(text, ratio, least)
