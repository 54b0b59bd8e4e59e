"""The options of the commands: what each is called and means.

A command names the options that are its own in its signature, and gets the groups that commands share, each declared
here once, by the decorator `takes`. None as a default means that the option was not given, so that the engine's or the
server's own default holds, which is written where it is used; a help text repeats it in brackets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

Command = TypeVar("Command", bound=Callable[..., int])

# ---------------------------------------------------------------------- what generate runs

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

# ---------------------------------------------------------------------- output

AsJson = Annotated[bool, typer.Option("--json", help="One JSON line per request and one summary line.")]
RecordFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write a recording that pointsman replay checks."),
]

# ---------------------------------------------------------------------- questions to a vLLM that runs

Socket = Annotated[str, typer.Option(metavar="PATH", help="Of the vLLM; its log tells it at the start.")]
AskedRequest = Annotated[str | None, typer.Argument(metavar="[ID]", help="One request, or those of one answer.")]
MostRequests = Annotated[int, typer.Option(help="Most requests to show, the oldest first.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="One JSON line per request.")]

# ---------------------------------------------------------------------- knobs of the engine and the scheduler

Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Knobs to start from: low-latency, high-throughput, long-context, short-requests, static or default; "
        "each knob that is given itself wins over them.",
    ),
]

KNOBS: dict[str, Any] = {
    "dtype": Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the weights: float32 or bfloat16 [default: float32].")
    ],
    "kv_cache_dtype": Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the KV cache: float32, bfloat16, or auto, the weights' [default: auto]."),
    ],
    "quantization": Annotated[
        str | None, typer.Option(metavar="NAME", help="int8: linear layers in 8 bits, with other answers.")
    ],
    "device": Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, or auto, a GPU if there is one [default: auto].")
    ],
    "attention": Annotated[
        str | None, typer.Option(metavar="NAME", help="numba, torch, or auto, the fastest [default: auto].")
    ],
    "fuse": Annotated[
        bool | None,
        typer.Option("--fuse/--no-fuse", help="Whether faster parts may replace the model's own [default: fuse]."),
    ],
    "threads": Annotated[int | None, typer.Option(help="Threads that PyTorch uses; its own choice otherwise.")],
    "grammar_timeout": Annotated[
        float | None, typer.Option(help="Seconds that a structured output's grammar may take to compile [default: 10].")
    ],
    "stream_interval": Annotated[
        int | None, typer.Option(help="Tokens from one output of a request to the next [default: 1].")
    ],
    "kv_offload_bytes": Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory for KV that the pool gives up, like 4GiB [default: none]."),
    ],
    "kv_store": Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory in which KV is kept for other engines and for later."),
    ],
    "kv_store_role": Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What to do with it: producer (write), consumer (read) or both [default: both]."
        ),
    ],
    "kv_store_bytes": Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most that the directory's files may take [default: no bound].")
    ],
    "kv_load_failure_policy": Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="If KV cannot be loaded: recompute it, or fail the request [default: recompute]."
        ),
    ],
    "kv_load_timeout": Annotated[
        float | None, typer.Option(help="Seconds after which a load from the KV store has failed [default: none].")
    ],
    "kv_events_config": Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Where to publish what the prefix cache holds, like {"endpoint": "tcp://*:5557"}; vLLM\'s fields.',
        ),
    ],
    "watchdog_seconds": Annotated[
        float | None,
        typer.Option(
            help="Seconds without progress, after which a request is reported in the log [default: 0, never]."
        ),
    ],
    "num_blocks": Annotated[int | None, typer.Option(help="KV blocks in the pool [default: 1 GiB of them or less].")],
    "kv_cache_bytes": Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The pool's size in bytes instead, like 64MiB."),
    ],
    "block_size": Annotated[int | None, typer.Option(help="Tokens per block [default: 32].")],
    "max_model_len": Annotated[int | None, typer.Option(help="Longest sequence, if less than the model's.")],
    "max_num_seqs": Annotated[int | None, typer.Option(help="Most requests that run at once [default: 64].")],
    "max_num_active_seqs": Annotated[
        int | None, typer.Option(help="Most requests that run at once, if fewer than that.")
    ],
    "max_num_batched_tokens": Annotated[
        int | None, typer.Option(help="Most tokens that a step computes [default: 512].")
    ],
    "max_steps_in_flight": Annotated[
        int | None,
        typer.Option(help="2: the next step is scheduled while one executes (asynchronous scheduling) [default: 1]."),
    ],
    "num_draft_tokens": Annotated[
        int | None,
        typer.Option(help="Speculation: most drafts from the request's own text that a step verifies [default: 0]."),
    ],
    "draft_table": Annotated[
        str | None,
        typer.Option(
            metavar="RUNNING:DRAFTS,...",
            help="Fewer drafts as more requests run: 16:2,64:0 is 2 from 16 on and none from 64 on.",
        ),
    ],
    "prompt_lookup_min": Annotated[
        int | None, typer.Option(help="Newest tokens that must have occurred before for a draft [default: 2].")
    ],
    "prompt_lookup_max": Annotated[
        int | None, typer.Option(help="Newest tokens that are looked for, at most [default: 5].")
    ],
    "speculative_config": Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Speculation in vLLM\'s words instead: {"method": "ngram", "num_speculative_tokens": 5}.',
        ),
    ],
    "order": Annotated[str | None, typer.Option(metavar="NAME", help="fcfs or priority [default: fcfs].")],
    "victim": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Who gives way: latest or lowest-priority [default: by the order].",
        ),
    ],
    "displace": Annotated[
        bool | None,
        typer.Option(
            "--displace/--no-displace",
            help="Under priority: whether the more urgent take the room of the less urgent [default: displace].",
        ),
    ],
    "watermark": Annotated[
        float | None,
        typer.Option(help="Share of the pool that an admission must leave free [default: 0]."),
    ],
    "decode_reserve": Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Output expected of a request, which an admission must find room for: a number, or mean, that of the "
            "last 128 [default: 0].",
        ),
    ],
    "batching": Annotated[
        str | None, typer.Option(metavar="NAME", help="mixed, or static for comparison [default: mixed].")
    ],
    "enable_prefix_caching": Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Whether blocks are found again by equal content [default: enabled].",
        ),
    ],
    "enable_chunked_prefill": Annotated[
        bool | None,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Whether a prompt may take several steps [default: enabled].",
        ),
    ],
    "long_prefill_token_threshold": Annotated[
        int | None,
        typer.Option(help="Most tokens that one request advances in a step [default: 0, no limit]."),
    ],
    "long_prefill_token_threshold_adaptive": Annotated[
        bool | None,
        typer.Option(
            "--long-prefill-token-threshold-adaptive/--no-long-prefill-token-threshold-adaptive",
            help="Whether that is at least a fair share of the step [default: no].",
        ),
    ],
    "max_num_partial_prefills": Annotated[
        int | None, typer.Option(help="Most prompts that may be half done at once [default: no cap].")
    ],
    "max_long_partial_prefills": Annotated[
        int | None, typer.Option(help="Most of these that may be longer than the threshold [default: no cap].")
    ],
    "log_request_events": Annotated[
        bool | None,
        typer.Option(
            "--log-request-events/--no-log-request-events",
            help="Whether each request keeps a log of what happened to it and when [default: no].",
        ),
    ],
    "full_sequence_must_fit": Annotated[
        bool | None,
        typer.Option(
            "--full-sequence-must-fit/--no-full-sequence-must-fit",
            help="Whether all of a prompt must fit, not only its first chunk [default: all].",
        ),
    ],
}
"""Arguments of `Engine` by name, but for `threads`, which is `num_threads` there."""

# ---------------------------------------------------------------------- what serve serves, and how

ConfigFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A YAML file of options; those on the command line win."),
]

SERVER: dict[str, Any] = {
    "model": Annotated[str | None, typer.Option(help="Directory of a Hugging Face model, or demo [default: demo].")],
    "host": Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0: every network [default: 127.0.0.1].")
    ],
    "port": Annotated[int | None, typer.Option(help="0: any free one [default: 8000].")],
    "api_key": Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key of which clients must send one; may be repeated. A command line can be read by others on the "
            "machine: --api-key-file and the variable POINTSMAN_API_KEY cannot.",
        ),
    ],
    "api_key_file": Annotated[str | None, typer.Option(metavar="FILE", help="API keys, one a line.")],
    "served_model_name": Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What clients call the model; may be repeated [default: as --model]."),
    ],
    "max_waiting_requests": Annotated[
        int | None, typer.Option(help="Open requests beyond those that can run at once; then 429 [default: 1024].")
    ],
    "max_waiting_prompt_tokens": Annotated[
        int | None, typer.Option(help="Prompt tokens of all requests without a first token; then 429.")
    ],
    "max_request_bytes": Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of a request's body; then 413 [default: 4MiB].")
    ],
    "max_tokens_limit": Annotated[int | None, typer.Option(help="Most tokens that one request may ask for.")],
    "max_n": Annotated[int | None, typer.Option(help="Most samples per prompt [default: 16].")],
    "max_logprobs": Annotated[int | None, typer.Option(help="Most log probabilities per position [default: 20].")],
    "max_deadline": Annotated[float | None, typer.Option(help="Seconds after which any request is ended.")],
    "drain_timeout": Annotated[
        float | None, typer.Option(help="Seconds that running requests get after SIGTERM [default: 30].")
    ],
    "chat_template": Annotated[
        str | None, typer.Option(metavar="FILE", help="A Jinja template in place of the tokenizer's own.")
    ],
    "response_role": Annotated[str | None, typer.Option(help="The role of chat answers [default: assistant].")],
    "log_requests": Annotated[
        bool | None,
        typer.Option("--log-requests/--no-log-requests", help="Whether prompts appear in the log [default: no]."),
    ],
    "log_stats_interval": Annotated[
        float | None, typer.Option(help="Seconds between lines of statistics; 0: none [default: 10].")
    ],
    "max_step_retries": Annotated[
        int | None, typer.Option(help="How often in a row a failed step is tried again [default: 0].")
    ],
    "record": RecordFile,
    "seed": Annotated[int | None, typer.Option(help="Of requests that bring none [default: 0].")],
}
"""Options of serve beside the knobs. All of these, and all knobs, may stand in its configuration file."""

SIZES = frozenset({"kv_cache_bytes", "max_request_bytes"})
"""Options whose value is a number of bytes, written like 64MiB."""
NUMBERS_OR_WORDS = frozenset({"decode_reserve"})
"""Options whose value is a whole number, or a word in its place."""

# ---------------------------------------------------------------------- chat

Url = Annotated[str, typer.Option(help="Where the server is, with or without /v1.")]
ChatModel = Annotated[str | None, typer.Option("--model", metavar="NAME", help="As the server calls it.")]
ChatApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help="The server's key; the variable POINTSMAN_API_KEY is better hidden."),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told before the first question.")]
ChatTemperature = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy; the server's default if not given.")
]
ChatMaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of an answer.")]


def takes(*groups: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Give a command the options of `groups`. It gets them all by name in its `**` parameter, None if not given."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for group in groups
            for name, annotation in group.items()
        ]
        command.__signature__ = signature.replace(parameters=own + shared)  # type: ignore[attr-defined]
        return command

    return decorate


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that the user gave. (A repeatable one that was not given may be an empty list.)"""
    return {name: value for name, value in values.items() if value is not None and value != []}
