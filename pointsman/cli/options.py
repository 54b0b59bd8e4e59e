"""The options of the commands: names, meanings, and their groups in `--help`.

A command has its own options in its signature. Options that commands share are declared here once; the decorator
`takes` adds them. The default None means that the option was not given: the default of the engine or the server then
applies. That default is defined where it is used, and the help text repeats it in brackets.

`GENERATE_HELP` and `SERVE_HELP` are the pages of the two commands with many options: the ten main options first, then
panels by subject. The pages are plain text, because Typer's framed panels cut off long option names at 80 columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand

from pointsman.cli.errors import CommandError
from pointsman.cli.scheduler_options import knobs_of_panel, served_options
from pointsman.cli.vllm_options import translate
from pointsman.core.observe.side_file import WhenFull
from pointsman.engine.sources.named import NAMED

Command = TypeVar("Command", bound=Callable[..., int])

# ---------------------------------------------------------------------- what generate runs

MODEL_FORMS = (
    "Directory of a Hugging Face model, GGUF file, name of a small model (pointsman models lists them: demo, "
    f"{', '.join(NAMED)}), or OWNER/NAME on a hub"
)
Model = Annotated[str | None, typer.Option(help=f"{MODEL_FORMS} [default: demo].")]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="The model, in place of --model.")]
PromptTexts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be repeated.")
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="File with one prompt per line, or JSON lines with prompt or prompt_token_ids; -: standard input.",
    ),
]
TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Trace, whose lengths and prefixes the made-up prompts have: Azure or BurstGPT CSV, Mooncake or "
        "Qwen-Bailian JSON lines.",
    ),
]
Speed = Annotated[
    float | None,
    typer.Option(help="With a trace: factor by which arrivals are sped up; 0: all arrive at the start [default: 1]."),
]
Limit = Annotated[int | None, typer.Option(help="With a trace: number of requests that are read from its start.")]

# ---------------------------------------------------------------------- sampling

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum tokens to generate [default: 64]; can only shorten the outputs of built-in prompts and traces.",
    ),
]
Temperature = Annotated[float, typer.Option(help="0: greedy sampling.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens up to this probability; 1: from all.")]
TopK = Annotated[int, typer.Option(help="Sample from this number of most likely tokens; 0: from all.")]
Seed = Annotated[int, typer.Option(help="Seed of sampling and of a trace's prompts.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End the output before this text; may be repeated.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue the output after the end-of-text token.")]

# ---------------------------------------------------------------------- output

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also log what developers of the engine need.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON line per request and one summary line.")]
RecordFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Write every call and decision of the scheduler, prompts included, for pointsman replay."
    ),
]

# ---------------------------------------------------------------------- questions to a running vLLM

Socket = Annotated[str, typer.Option(metavar="PATH", help="Control socket of the vLLM; its log names it at the start.")]
AskedRequest = Annotated[
    str | None, typer.Argument(metavar="ID", help="ID of a request, or of a response with its requests.")
]
MaxRequests = Annotated[int, typer.Option(help="Maximum number of requests to show, the oldest first.")]
AsJsonLines = Annotated[
    bool, typer.Option("--json", help="One JSON line per request; its position counts the requests before it.")
]

# ---------------------------------------------------------------------- knobs of the engine and the scheduler

Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Settings to start from: low-latency, high-throughput, long-context, short-requests, static or default; "
        "options that are given override them.",
    ),
]

KNOBS: dict[str, Any] = {
    "revision": Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a hub's model [default: main].")
    ],
    "download_dir": Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Cache for a hub's model [default: huggingface_hub's, in HF_HOME]."),
    ],
    "dtype": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Type of the weights: float32, bfloat16, float16 (only on a GPU), or auto (bfloat16 on a GPU, "
            "otherwise float32) [default: auto].",
        ),
    ],
    "kv_cache_dtype": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Type of the KV cache: float32, bfloat16, float16 (only on a GPU), or auto (the type of the weights) "
            "[default: auto].",
        ),
    ],
    "quantization": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="int8: linear layers in 8 bits, which changes outputs a little. int4: as int8, but steps with few "
            "requests use the 4 bits of a GGUF file.",
        ),
    ],
    "device": Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, or auto: a GPU if there is one [default: auto].")
    ],
    "enforce_eager": Annotated[
        bool | None,
        typer.Option(
            "--enforce-eager/--no-enforce-eager",
            help="Whether decode steps on a GPU run without CUDA graphs; no effect on a CPU [default: no].",
        ),
    ],
    "attention": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Kernels of attention: numba, triton (on a GPU), torch, or auto (the fastest) [default: auto].",
        ),
    ],
    "fuse": Annotated[
        bool | None,
        typer.Option("--fuse/--no-fuse", help="Whether fused layers may replace the model's own [default: yes]."),
    ],
    "threads": Annotated[int | None, typer.Option(help="Threads of PyTorch [default: PyTorch's choice].")],
    "grammar_timeout": Annotated[
        float | None,
        typer.Option(help="Maximum seconds of processor time to compile a structured output's grammar [default: 10]."),
    ],
    "stream_interval": Annotated[
        int | None, typer.Option(help="Tokens between two outputs of a request [default: 1].")
    ],
    "kv_offload_bytes": Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Host memory for KV that is evicted from the pool, like 4GiB [default: none]."
        ),
    ],
    "kv_store": Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory that keeps KV for other engines and later runs."),
    ],
    "kv_store_role": Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Use of the KV store: producer (write), consumer (read) or both [default: both]."
        ),
    ],
    "kv_store_bytes": Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum size of the KV store's files [default: no limit].")
    ],
    "disable_hybrid_kv_cache_manager": Annotated[
        bool | None,
        typer.Option(
            "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
            help="Whether layers with a sliding window keep the KV of the whole context [default: yes, unless windows "
            "take less memory].",
        ),
    ],
    "kv_events_config": Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Where to publish changes of the prefix cache, in vLLM\'s form: {"endpoint": "tcp://*:5557"}.',
        ),
    ],
    "watchdog_seconds": Annotated[
        float | None,
        typer.Option(help="Seconds without progress after which the log reports a request [default: 0: never]."),
    ],
    "kv_cache_bytes": Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Size of the KV pool, like 64MiB, in place of --num-blocks."),
    ],
    "gpu_memory_utilization": Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory for weights, steps and the KV pool, if the pool's size is not given "
            "[default: 0.9]."
        ),
    ],
    "prompt_lookup_min": Annotated[
        int | None, typer.Option(help="Minimum number of newest tokens that prompt lookup matches [default: 2].")
    ],
    "prompt_lookup_max": Annotated[
        int | None, typer.Option(help="Maximum number of newest tokens that prompt lookup matches [default: 5].")
    ],
    "speculative_config": Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='These settings in vLLM\'s form: {"method": "ngram", "num_speculative_tokens": 5}.',
        ),
    ],
    **served_options(),
}
"""Arguments of `Engine` by name, except `threads`, whose argument is `num_threads`."""

# ---------------------------------------------------------------------- serve

ConfigFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="YAML file of options; the command line overrides it."),
]

SERVER: dict[str, Any] = {
    "model": Annotated[
        str | None, typer.Option(help=f"{MODEL_FORMS} [default: smollm2 if it is installed, otherwise demo].")
    ],
    "host": Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0: all networks [default: 127.0.0.1].")
    ],
    "port": Annotated[int | None, typer.Option(help="Port to listen on; 0: any free port [default: 8000].")],
    "api_key": Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key that clients must send; may be repeated. Other users of the machine can read a command line, "
            "but not --api-key-file or the variable POINTSMAN_API_KEY.",
        ),
    ],
    "api_key_file": Annotated[
        str | None, typer.Option(metavar="FILE", help="File of API keys, one per line: KEY or NAME:KEY.")
    ],
    "operator_key": Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key that operators must send, to pause the server or to see every request; may be repeated. Safer: "
            "--operator-key-file, or the variable POINTSMAN_OPERATOR_KEY [default: programs on this machine need none, "
            "unless clients have keys].",
        ),
    ],
    "operator_key_file": Annotated[
        str | None, typer.Option(metavar="FILE", help="File of operator keys, one per line.")
    ],
    "allowed_host": Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another name of this server in the Host header of operators' and browsers' requests, like gpu1 or "
            "gpu1:8000; may be repeated [default: localhost, and the address that is called].",
        ),
    ],
    "served_model_name": Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name of the model for clients; may be repeated [default: as --model]."),
    ],
    "max_connections": Annotated[
        int | None,
        typer.Option(
            help="Maximum client connections; a new one then replaces an idle one [default: 4096, or by the limit of "
            "open files]."
        ),
    ],
    "max_connections_per_address": Annotated[
        int | None, typer.Option(help="Maximum connections of one address [default: no limit].")
    ],
    "max_waiting_requests": Annotated[
        int | None, typer.Option(help="Maximum open requests beyond --max-num-seqs; others get 429 [default: 1024].")
    ],
    "max_waiting_prompt_tokens": Annotated[
        int | None,
        typer.Option(
            help="Maximum prompt tokens of all requests without a first token; others get 429 [default: no limit]."
        ),
    ],
    "max_request_bytes": Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Maximum size of a body; larger ones get 413 [default: 4MiB]."),
    ],
    "max_total_request_bytes": Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Maximum size of all bodies that arrive or are not parsed yet; others get 429 [default: 16 times "
            "--max-request-bytes].",
        ),
    ],
    "max_waiting_characters": Annotated[
        int | None,
        typer.Option(
            help="Maximum characters of requests that wait to be tokenized; others get 429 [default: 4 times "
            "--max-request-bytes]."
        ),
    ],
    "max_tokens_limit": Annotated[
        int | None, typer.Option(help="Maximum max_tokens of a request [default: no limit].")
    ],
    "max_n": Annotated[int | None, typer.Option(help="Maximum n, the samples per prompt [default: 16].")],
    "max_logprobs": Annotated[int | None, typer.Option(help="Maximum log probabilities per position [default: 20].")],
    "max_deadline": Annotated[
        float | None,
        typer.Option(help="Maximum deadline in seconds, and the deadline of requests without one [default: no limit]."),
    ],
    "min_request_priority": Annotated[
        int | None,
        typer.Option(help="Smallest (most urgent) priority, at most 0; smaller ones get 400 [default: no limit]."),
    ],
    "min_ttft_target": Annotated[
        float | None,
        typer.Option(help="Minimum TTFT target, in seconds; shorter ones get 400 [default: no limit]."),
    ],
    "max_retention": Annotated[
        float | None,
        typer.Option(help="Maximum retention, in seconds; longer ones get 400 [default: 600]."),
    ],
    "tenant_from": Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Source of a request's tenant: key (the name of its API key), user (a field of its body), or "
            "header:NAME. The last two only behind a trusted proxy, because clients may send any value [default: key].",
        ),
    ],
    "isolate_prefixes": Annotated[
        bool | None,
        typer.Option(
            "--isolate-prefixes/--no-isolate-prefixes",
            help="Whether cached prefixes are private to a tenant, so that no other one detects its prompts "
            "[default: no].",
        ),
    ],
    "drain_delay": Annotated[
        float | None,
        typer.Option(
            help="Seconds after SIGTERM in which /ready is 503 and new requests are still accepted; set more than the "
            "interval of the router's checks [default: 0]."
        ),
    ],
    "drain_timeout": Annotated[
        float | None,
        typer.Option(help="Seconds for running requests to finish after SIGTERM and --drain-delay [default: 30]."),
    ],
    "chat_template": Annotated[
        str | None, typer.Option(metavar="FILE", help="Jinja template in place of the tokenizer's.")
    ],
    "response_role": Annotated[str | None, typer.Option(help="Role of chat completions [default: assistant].")],
    "log_requests": Annotated[
        bool | None,
        typer.Option("--log-requests/--no-log-requests", help="Whether prompts appear in the log [default: no]."),
    ],
    "log_stats_interval": Annotated[
        float | None, typer.Option(help="Seconds between lines of statistics; 0: none [default: 10].")
    ],
    "max_step_retries": Annotated[
        int | None, typer.Option(help="Maximum consecutive retries of a failed step [default: 0].")
    ],
    "data_parallel_size": Annotated[
        int | None,
        typer.Option(
            help="Number of engine processes. They share the cores and the KV memory given here, or have one GPU each "
            "[default: 1]."
        ),
    ],
    "max_engine_restarts": Annotated[
        int | None,
        typer.Option(
            help="Consecutive deaths of an engine after which it is not restarted [default: 5; 0 with "
            "one engine: its death ends the server]."
        ),
    ],
    "max_resumes": Annotated[
        int | None,
        typer.Option(help="How often a request is resumed after the death of its engine; then it fails [default: 3]."),
    ],
    "engine_timeout": Annotated[
        float | None,
        typer.Option(
            help="Seconds without a sign of life after which an engine counts as dead; 0: never [default: 30]."
        ),
    ],
    "warm_up": Annotated[
        bool | None,
        typer.Option(
            "--warm-up/--no-warm-up",
            help="Whether requests of every kind run once before the server accepts any [default: yes].",
        ),
    ],
    "record": RecordFile,
    "record_when_full": Annotated[
        str | None,
        typer.Option(
            metavar="|".join(get_args(WhenFull)),
            help="Effect of a full disk on the recording: stop ends it; wait keeps up to 64 MiB in memory until space "
            "is free [default: stop].",
        ),
    ],
    "seed": Annotated[int | None, typer.Option(help="Seed of requests that give none [default: 0].")],
}
"""Options of serve other than knobs. The configuration file of serve may set all these options and all knobs."""

SIZES = frozenset({"kv_cache_bytes", "max_request_bytes", "max_total_request_bytes"})
"""Options whose value is a number of bytes, written like 64MiB."""

# ---------------------------------------------------------------------- chat

Url = Annotated[str, typer.Option(help="URL of the server, with or without /v1.")]
ChatModel = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Name of the model at the server.")]
ChatApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help="API key of the server; the variable POINTSMAN_API_KEY is safer."),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the conversation.")]
ChatTemperature = Annotated[
    float | None, typer.Option("--temperature", help="Sampling temperature; 0: greedy [default: the server's].")
]
ChatMaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Maximum tokens of a completion.")]


# ---------------------------------------------------------------------- help pages

Panels = Mapping[str, tuple[str, ...]]
"""Panels of a help page, in order: each title with the names of the panel's options. An option is shown in the first
panel that names it."""

ENGINE_PANELS: Panels = {
    "Model and device": (
        "revision",
        "download_dir",
        "dtype",
        "quantization",
        "device",
        "enforce_eager",
        "attention",
        "fuse",
        "threads",
    ),
    "KV pool and prefix cache": (
        "num_blocks",
        "kv_cache_bytes",
        "gpu_memory_utilization",
        "block_size",
        "max_model_len",
        "kv_cache_dtype",
        "disable_hybrid_kv_cache_manager",
        *knobs_of_panel("KV pool and prefix cache"),
    ),
    "Steps": knobs_of_panel("Steps"),
    "Admission and preemption": knobs_of_panel("Admission and preemption"),
    "Speculation": (
        *knobs_of_panel("Speculation"),
        "prompt_lookup_min",
        "prompt_lookup_max",
        "speculative_config",
    ),
    "KV outside the pool": (
        "kv_offload_bytes",
        "kv_store",
        "kv_store_role",
        "kv_store_bytes",
        *knobs_of_panel("KV outside the pool"),
        "kv_events_config",
    ),
    "Outputs and observation": (
        "stream_interval",
        "grammar_timeout",
        *knobs_of_panel("Outputs and observation"),
        "watchdog_seconds",
        "log_requests",
        "log_stats_interval",
        "record",
        "record_when_full",
    ),
}

GENERATE_HELP: Panels = {
    "Main options": (
        "model_argument",
        "model",
        "prompt",
        "prompts",
        "trace",
        "max_tokens",
        "temperature",
        "num_blocks",
        "max_num_seqs",
        "preset",
        "as_json",
    ),
    "Traces": ("speed", "limit"),
    "Sampling": ("top_p", "top_k", "seed", "stop", "ignore_eos"),
    "Output": ("verbose",),
    **ENGINE_PANELS,
}

SERVE_HELP: Panels = {
    "Main options": (
        "model_argument",
        "config",
        "model",
        "host",
        "port",
        "api_key_file",
        "preset",
        "dtype",
        "kv_cache_bytes",
        "max_model_len",
        "max_num_seqs",
    ),
    "Requests and limits": (
        "max_connections",
        "max_connections_per_address",
        "max_waiting_requests",
        "max_waiting_prompt_tokens",
        "max_request_bytes",
        "max_total_request_bytes",
        "max_waiting_characters",
        "max_tokens_limit",
        "max_n",
        "max_logprobs",
        "max_deadline",
        "min_request_priority",
        "min_ttft_target",
        "max_retention",
        "tenant_from",
        "isolate_prefixes",
        "seed",
    ),
    "Server": (
        "verbose",
        "api_key",
        "operator_key_file",
        "operator_key",
        "allowed_host",
        "served_model_name",
        "chat_template",
        "response_role",
        "drain_delay",
        "drain_timeout",
        "data_parallel_size",
        "max_engine_restarts",
        "max_resumes",
        "engine_timeout",
        "max_step_retries",
        "warm_up",
    ),
    **ENGINE_PANELS,
}


def grouped(panels: Panels, *, takes_vllm_options: bool = False) -> type[TyperCommand]:
    """The class of a command whose help page has these panels.

    Args:
        takes_vllm_options: whether options of `vllm serve` are understood too.
    """

    class Grouped(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if takes_vllm_options and not ctx.resilient_parsing:
                params = [(param, name) for param in self.get_params(ctx) for name in param.opts + param.secondary_opts]
                args = translate(args, {name: not getattr(param, "is_flag", False) for param, name in params})
            return super().parse_args(ctx, args)

        def format_options(self, ctx: Any, formatter: Any) -> None:
            records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
            for title, names in panels.items():
                self._write(formatter, title, [records.pop(name) for name in names if name in records])
            self._write(formatter, "Other", list(records.values()))

        @staticmethod
        def _write(formatter: Any, title: str, records: list[tuple[str, str] | None]) -> None:
            if rows := [record for record in records if record is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    return Grouped


# ---------------------------------------------------------------------- options in commands


def takes(*groups: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Decorator that adds the options of `groups` to a command. The command gets their values by name in its `**`
    parameter; None: the option was not given."""

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


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model that an argument or --model names; None: neither was given.

    Raises:
        CommandError: the two name different models.
    """
    if argument is not None and option is not None and argument != option:
        raise CommandError(f"the model is {argument} and --model is {option}; give one of them")
    return option if argument is None else argument


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given on the command line. (The value of a repeatable option that was not given may be an
    empty list.)"""
    return {name: value for name, value in values.items() if value is not None and value != []}
