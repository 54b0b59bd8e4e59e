"""vLLM with Pointsman's scheduler: the same tokens, and the reason why a request waits.

    python examples/vllm_drop_in.py MODEL [DTYPE]

MODEL is a directory with weights, or a name on the Hugging Face hub; a CPU without bfloat16 needs DTYPE float32. vLLM
must be installed in the same environment. A server has the option `--scheduler-cls
pointsman.integrations.vllm.Scheduler`.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm import LLM, SamplingParams

SCHEDULER = "pointsman.integrations.vllm.Scheduler"
PROMPTS = ["The import statement", "A class is", "def main():"]


def generate(model: str, **options: Any) -> list[str]:
    """The completions of vLLM with its own scheduler, or with the one of the options."""
    llm = LLM(model, max_model_len=512, max_num_seqs=2, enforce_eager=True, **options)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    model, dtype = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "auto")
    # Knobs of Pointsman are keys of additional_config; all others keep vLLM's names.
    knobs = {"pointsman": {"order": "shortest-prefill", "victim": "least-cost"}}
    ours = generate(model, dtype=dtype, scheduler_cls=SCHEDULER, additional_config=knobs)
    for prompt, text in zip(PROMPTS, ours, strict=True):
        print(repr(prompt), "->", repr(text))
    print("the same as with vLLM's own scheduler:", ours == generate(model, dtype=dtype))


if __name__ == "__main__":
    main()
