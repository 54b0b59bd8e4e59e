"""Measurements that need a real model: the gain of drafts, the cached share of a chat, the explanations of waiting
requests, and the simulator's prediction of a server.

Random weights write random text: their drafts are never accepted, and their conversations do not continue. So this runs
`smollm2`, of 135 M parameters, and is skipped if that is not installed (`pointsman models get smollm2`).

- Drafts: code edits, summaries and chats, with prompt lookup beside without. The outputs must be equal. A copied file
  must gain, and no other work may lose much.
- Prefixes: a chat of ten turns, in which each turn sends the whole conversation. All whole blocks that were computed
  before must be hit.
- Explanations: chats at the same time in a small KV cache. The server's explanations of waiting requests must not
  contradict each other, and its recording must account for the time that users waited.
- Prediction: a profile of the server's recording, as `calibration.py` makes it, and with the same limits.

    python benchmarks/real_model.py --check
"""

from __future__ import annotations

from typing import Any

import torch
from _common import Targets, argument_parser, finish, note, parse_positive_int, run
from _real_drafts import measure_drafts
from _real_explain import measure_explanations
from _real_prediction import NUM_REQUESTS, ROUNDS, measure_prediction
from _real_prefixes import measure_prefixes

from pointsman.engine.model.loader import load_model
from pointsman.engine.sources.named import installed_file

MODEL = "smollm2"
PARTS = ("drafts", "prefixes", "explanations", "prediction")


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--only", choices=PARTS, help="measure this alone")
    parser.add_argument(
        "--rounds", type=parse_positive_int, help=f"pairs of runs for the prediction [default: {ROUNDS}]"
    )
    parser.add_argument("--requests", type=parse_positive_int, help=f"requests of such a run [default: {NUM_REQUESTS}]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quick, targets = arguments.quick, Targets()
    chosen = [part for part in PARTS if arguments.only in (None, part)]
    figures: dict[str, Any] = dict.fromkeys(PARTS)
    for part in PARTS:
        if part not in chosen:
            targets.skip(part, f"--only {arguments.only}")
    path = installed_file(MODEL)
    if path is None:
        note(f"skipped: {MODEL} is not installed; pointsman models get {MODEL} installs it")
        for part in chosen:
            targets.skip(part, f"{MODEL} is not installed")
        chosen = []
    if quick and "prediction" in chosen:
        chosen.remove("prediction")
        targets.skip("prediction", "--quick")
    if {"drafts", "prefixes", "prediction"} & set(chosen):
        note(f"{MODEL} is loaded")
        model = load_model(path, "float32")
    for part in chosen:
        if part == "drafts":
            figures[part] = measure_drafts(model, quick, targets)
        elif part == "prefixes":
            figures[part] = measure_prefixes(model, quick, targets)
        elif part == "explanations":
            figures[part] = measure_explanations(MODEL, quick, targets)
        else:
            figures[part] = measure_prediction(MODEL, model.tokenizer, arguments.rounds, arguments.requests, targets)
    return finish("real_model", {"quick": quick, "model": MODEL, **figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
