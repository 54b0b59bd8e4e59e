"""The options of `pointsman generate`: what each is called and means.

None as a default means that the engine's own default holds, so that it is written in one place.
"""

from __future__ import annotations

from typing import Annotated

import typer

# ---------------------------------------------------------------------- what to run

Model = Annotated[str, typer.Option(help="Directory of a Hugging Face model, or demo.")]
PromptTexts = Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="A prompt a line, or JSON lines with prompt or prompt_token_ids; - is standard input.",
    ),
]
TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Azure or BurstGPT CSV, or Mooncake JSON lines: made-up prompts with the trace's lengths and prefixes.",
    ),
]
Speed = Annotated[
    float | None,
    typer.Option(help="With a trace: arrivals so many times as fast [default: 1]; 0: all at once."),
]
Limit = Annotated[int | None, typer.Option(help="With a trace: only so many requests from its start.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.", metavar="NAME")]
KvCacheDtype = Annotated[str, typer.Option(help="Of the KV cache: float32, bfloat16, or auto.", metavar="NAME")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.", metavar="NAME")]
Threads = Annotated[int | None, typer.Option(help="Threads that PyTorch uses; its own choice otherwise.")]

# ---------------------------------------------------------------------- sampling

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens to generate [default: 64]; can only shorten what built-in prompts and traces bring along.",
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens; 1: from all.")]
TopK = Annotated[int, typer.Option(help="Sample from so many tokens; 0: from all.")]
Seed = Annotated[int, typer.Option(help="Fixes what is sampled and a trace's prompts.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of text.")]

# ---------------------------------------------------------------------- the scheduler's knobs

NumBlocks = Annotated[int | None, typer.Option(help="KV blocks in the pool.")]
KvCacheBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The pool's size in bytes instead, like 64MiB."),
]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per block.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence, if less than the model's.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Most requests that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Most tokens that a step computes.")]
OrderName = Annotated[str | None, typer.Option("--order", metavar="NAME", help="fcfs or priority.")]
VictimName = Annotated[
    str | None,
    typer.Option("--victim", metavar="NAME", help="Who gives way: latest or lowest-priority."),
]
Displace = Annotated[
    bool | None,
    typer.Option(
        "--displace/--no-displace",
        help="Under priority: whether the more urgent take the room of the less urgent.",
    ),
]
Watermark = Annotated[
    float | None,
    typer.Option(help="Share of the pool that an admission must leave free."),
]
Batching = Annotated[str | None, typer.Option(metavar="NAME", help="mixed, or static for comparison.")]
EnablePrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Whether blocks are found again by equal content.",
    ),
]
EnableChunkedPrefill = Annotated[
    bool | None,
    typer.Option(
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        help="Whether a prompt may take several steps.",
    ),
]
LongPrefillTokenThreshold = Annotated[
    int | None,
    typer.Option(help="Most tokens that one request advances in a step."),
]
FullSequenceMustFit = Annotated[
    bool | None,
    typer.Option(
        "--full-sequence-must-fit/--no-full-sequence-must-fit",
        help="Whether all of a prompt must fit, not only its first chunk.",
    ),
]

# ---------------------------------------------------------------------- output

AsJson = Annotated[bool, typer.Option("--json", help="One JSON line per request and one summary line.")]
RecordFile = Annotated[
    str | None,
    typer.Option("--record", metavar="FILE", help="Write a recording that pointsman replay checks."),
]
