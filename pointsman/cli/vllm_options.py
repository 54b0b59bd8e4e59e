"""A command line of `vllm serve`, understood by `pointsman serve`.

Each option of `vllm serve` is in one of three tables:

    SAME             `pointsman serve` has the option under the same name
    RENAMED          `pointsman serve` has an option of the same meaning under another name, which is given instead
    EXPLAINED        the option has no meaning here: the command answers with one sentence, which says what does that
                     here; options that can change no output (`HARMLESS`), and those whose value is what happens here
                     anyway (`ALREADY`), are accepted with that sentence as a warning

Options are named as in vLLM 0.32 and 0.33, without the hyphens in front. A flag is named as it is switched on. Its
other forms, `--no-x`, and `--disable-x` for `--enable-x`, are derived.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pointsman.cli.errors import CommandError
from pointsman.files import represented


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SAME = _names(
    """
    api-key block-size chat-template config data-parallel-size disable-hybrid-kv-cache-manager download-dir dtype
    enable-chunked-prefill enable-prefix-caching enforce-eager gpu-memory-utilization help host kv-cache-dtype
    kv-events-config long-prefill-token-threshold long-prefill-token-threshold-adaptive max-logprobs max-model-len
    max-num-active-seqs max-num-batched-tokens max-num-seqs model port quantization response-role revision seed
    served-model-name speculative-config stream-interval watermark
    """
)
"""Options of `vllm serve` that `pointsman serve` has under the same name."""

SHORT: Mapping[str, str] = MappingProxyType(
    {
        "asc": "api-server-count", "pp": "pipeline-parallel-size", "n": "nnodes", "r": "node-rank",
        "tp": "tensor-parallel-size", "dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size",
        "dp": "data-parallel-size", "dpn": "data-parallel-rank", "dpr": "data-parallel-start-rank",
        "dpl": "data-parallel-size-local", "dpa": "data-parallel-address", "dpp": "data-parallel-rpc-port",
        "dpb": "data-parallel-backend", "dph": "data-parallel-hybrid-lb", "dpe": "data-parallel-external-lb",
        "dpm": "data-parallel-multi-port-external-lb", "ep": "enable-expert-parallel", "q": "quantization",
        "sc": "speculative-config", "dc": "diffusion-config", "cc": "compilation-config", "ac": "attention-config",
        "O": "optimization-level", "h": "help",
    }
)  # fmt: skip
"""Short options of `vllm serve`."""

_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_WHOLE = _names(
    """
    kv-cache-memory-bytes max-model-len max-num-batched-tokens max-num-queued-tokens num-gpu-blocks-override
    """
)
"""Options whose value vLLM also takes like 16k (16,000) or 16K (16,384)."""
_DTYPES = {"half": "float16", "float": "float32"}


def _whole(value: str) -> str:
    """A number like "16k", "1.5M" or "4096" as vLLM understands it: decimal units are lower-case, binary ones are
    capitals. Another text is returned as it is."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([kmgtKMGT]?)", value.strip())
    if found is None or ("." in found[1] and not found[2]):
        return value
    return str(round(float(found[1]) * _UNITS[found[2]])) if "." in found[1] else str(int(found[1]) * _UNITS[found[2]])


def _blocks(value: str) -> str:
    number = _whole(value)
    return str(int(number) - 1) if number.isdigit() else value


def _order(value: str) -> str:
    if value not in ("fcfs", "priority"):
        raise CommandError(
            f"--scheduling-policy is {represented(value)}; vLLM has fcfs and priority; --order has all orders of "
            "pointsman policies"
        )
    return value


@dataclass(frozen=True, slots=True)
class Renamed:
    """An option of the same meaning under another name."""

    name: str
    """Our name; for a flag, the one that switches on."""
    convert: Callable[[str], str] = str
    """Function from vLLM's value to ours."""
    on: tuple[str, ...] = ()
    """For a flag: our arguments if vLLM's is switched on; empty: the option takes a value."""
    off: tuple[str, ...] = ()


RENAMED: Mapping[str, Renamed] = MappingProxyType(
    {
        "scheduling-policy": Renamed("order", _order),
        "device-memory-utilization": Renamed("gpu-memory-utilization"),
        "kv-cache-memory-bytes": Renamed("kv-cache-bytes", _whole),
        "num-gpu-blocks-override": Renamed("num-blocks", _blocks),  # vLLM keeps one block for itself
        "kv-offloading-size": Renamed("kv-offload-bytes", lambda value: f"{value}GiB"),
        "max-num-queued-tokens": Renamed("max-waiting-prompt-tokens", _whole),
        "shutdown-timeout": Renamed("drain-timeout"),
        "spec-tokens": Renamed("num-draft-tokens"),
        "async-scheduling": Renamed(
            "max-steps-in-flight", on=("--max-steps-in-flight", "2"), off=("--max-steps-in-flight", "1")
        ),
        "scheduler-reserve-full-isl": Renamed(
            "full-sequence-must-fit", on=("--full-sequence-must-fit",), off=("--no-full-sequence-must-fit",)
        ),
        "disable-log-stats": Renamed("log-stats-interval", on=("--log-stats-interval", "0"), off=()),
        "disable-log-requests": Renamed("log-requests", on=("--no-log-requests",), off=()),
    }
)
"""Options of `vllm serve` whose meaning an option of `pointsman serve` has under another name."""

_GROUPS: tuple[tuple[str, str], ...] = (
    # ------------------------------------------------------------------ several devices and machines
    (
        "tensor-parallel-size pipeline-parallel-size",
        "splits a model over devices in vLLM; here an engine has one device, and --data-parallel-size runs several "
        "engines, each with the whole model",
    ),
    (
        "decode-context-parallel-size prefill-context-parallel-size dcp-comm-backend dcp-q-replicate "
        "dcp-kv-cache-interleave-size cp-kv-cache-interleave-size enable-hc-sp enable-batch-sharded-sampling",
        "splits the work of one model over devices in vLLM; here an engine has one device: leave it out",
    ),
    (
        "master-addr master-port nnodes node-rank distributed-timeout-seconds cpu-distributed-timeout-seconds headless "
        "distributed-executor-backend ray-workers-use-nsight disable-custom-all-reduce",
        "sets how the workers of one vLLM on several devices or machines work together; here an engine is one process "
        "with one device: run a server on each machine, behind a router that asks /ready",
    ),
    (
        "data-parallel-rank data-parallel-start-rank data-parallel-size-local data-parallel-address "
        "data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb "
        "data-parallel-multi-port-external-lb data-parallel-supervisor-port dp-supervisor-probe-interval-s "
        "dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold dp-sync-interval "
        "disable-nccl-for-dp-synchronization",
        "places vLLM's data-parallel engines on several machines; here all --data-parallel-size engines are on this "
        "machine: run a server on each machine, behind a router that asks /ready",
    ),
    (
        "enable-expert-parallel enable-ep-weight-filter all2all-backend enable-elastic-ep elastic-ep-max-dp-size "
        "enable-eplb eplb-config expert-placement-strategy",
        "spreads the experts of a model over devices in vLLM; here an engine has one device, which holds all experts: "
        "leave it out",
    ),
    (
        "enable-dbo ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold",
        "splits a step of vLLM into micro-batches, so that devices compute while they communicate; here an engine has "
        "one device, and a step is one batch: leave it out",
    ),
    (
        "device-ids",
        "chooses the GPUs of vLLM; here --device names one, like cuda:1, or set the variable CUDA_VISIBLE_DEVICES",
    ),
    (
        "enable-fault-tolerance fault-tolerance-config",
        "sets how vLLM continues after the failure of a worker; here --max-engine-restarts and --max-resumes restart "
        "an engine and resume its requests",
    ),
    ("api-server-count", "sets the number of vLLM's API processes; here one process serves all engines: leave it out"),
    ("worker-cls worker-extension-cls", "replaces vLLM's workers by another class; here there are no workers"),
    # ------------------------------------------------------------------ the model
    (
        "trust-remote-code code-revision",
        "is for models with code of their own, which vLLM may run; such models are not run here: give a model that "
        "transformers knows",
    ),
    (
        "tokenizer tokenizer-revision tokenizer-mode skip-tokenizer-init",
        "makes vLLM take another tokenizer, or none; here the tokenizer is the one in the model's folder: put "
        "tokenizer.json and tokenizer_config.json there",
    ),
    (
        "runner convert pooler-config max-lora-cls-labels io-processor-plugin",
        "makes vLLM pool or classify; here every model generates, and /v1/embeddings pools its hidden states: "
        "leave it out",
    ),
    (
        "hf-config-path config-format hf-overrides model-class-overrides model-impl",
        "changes how vLLM reads a model's config.json, or its implementation; here config.json is read as it is, from "
        "the model's folder: change a copy of it",
    ),
    ("hf-token", "is the token for Hugging Face; here set the variable HF_TOKEN, which other users cannot read"),
    (
        "generation-config override-generation-config",
        "changes the default sampling parameters of vLLM; here they come from generation_config.json in the model's "
        "folder: change a copy of it, or send the parameters with the request",
    ),
    (
        "quantization-config allow-deprecated-quantization",
        "sets details of a quantization of vLLM; here --quantization is int8 or int4, without details",
    ),
    (
        "load-format model-loader-extra-config ignore-patterns",
        "changes how vLLM reads weights; here weights are safetensors in the model's folder, or a GGUF file as --model",
    ),
    (
        "safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size use-tqdm-on-load "
        "pt-load-map-location max-parallel-loading-workers",
        "changes how fast vLLM reads weights, or what it shows meanwhile; here there is one way of reading them",
    ),
    (
        "enable-lora lora-modules max-loras max-lora-rank lora-dtype enable-tower-connector-lora max-cpu-loras "
        "fully-sharded-loras lora-target-modules default-mm-loras specialize-active-lora enable-mixed-moe-lora-format "
        "enable-moe-shared-loras",
        "is for LoRA adapters, which only vLLM runs; here give --model a model with the adapter merged into it, or run "
        "vLLM with this scheduler (docs/guides/run_inside_vllm.md)",
    ),
    (
        "limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs mm-processor-cache-gb "
        "mm-processor-cache-type mm-hasher-algorithm mm-shm-cache-max-object-size-mb mm-encoder-only "
        "mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path "
        "mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin interleave-mm-strings skip-mm-profiling "
        "video-pruning-rate video-pruning-method mm-tensor-ipc mm-processor-device mm-ipc-gpu-memory-gb "
        "mm-device-do-normalize disable-chunked-mm-input allowed-local-media-path allowed-media-domains "
        "trust-request-mm-kwargs ec-transfer-config ec-manager-config",
        "is for images, audio and video, which only vLLM takes; here requests are text: leave it out, or run vLLM with "
        "this scheduler (docs/guides/run_inside_vllm.md)",
    ),
    ("language-model-only", "runs only the text part of a model with images; here requests are text anyway"),
    ("enable-prompt-embeds", "lets clients of vLLM send embeddings as a prompt; here a prompt is text or token ids"),
    ("diffusion-config", "is for models that generate by diffusion, which are not run here"),
    ("engram-config", "places the N-gram embeddings of some models in vLLM; such models are not run here"),
    # ------------------------------------------------------------------ kernels and compilation
    (
        "attention-backend attention-config",
        "chooses vLLM's kernels of attention; here --attention chooses numba, triton or torch",
    ),
    (
        "gdn-prefill-backend kda-prefill-backend kda-decode-backend mamba-backend mamba-ssu-algorithm "
        "enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds mamba-cache-dtype mamba-ssm-cache-dtype "
        "mamba-block-size mamba-cache-mode enable-mamba-shared-prefix-checkpoint replayssm-buffer-len use-replayssm",
        "is for layers with a state instead of KV (Mamba, linear attention), which only vLLM runs; leave it out",
    ),
    (
        "cudagraph-capture-sizes max-cudagraph-capture-size",
        "sets for which batches vLLM captures CUDA graphs; here they are chosen by --max-num-seqs, and --enforce-eager "
        "switches them off",
    ),
    (
        "compilation-config optimization-level performance-mode kernel-config ir-op-priority moe-backend "
        "linear-backend sparse-indexer-topk-backend enable-flashinfer-autotune disable-cascade-attn monokernel",
        "chooses how vLLM compiles a model and which kernels it takes; here --fuse, --attention and --enforce-eager do "
        "that",
    ),
    (
        "use-fp64-gumbel",
        "lets vLLM sample with random numbers of 64 bits; here sampling has no such choice: leave it out",
    ),
    (
        "numa-bind numa-bind-nodes numa-bind-cpus",
        "binds vLLM's workers to processors; here --threads sets their number, and numactl or taskset binds the server",
    ),
    (
        "offload-backend cpu-offload-gb cpu-offload-params offload-group-size offload-num-in-group "
        "offload-prefetch-step offload-params",
        "keeps weights of vLLM in host memory; here all weights are on --device: take --quantization int8, or --device "
        "cpu",
    ),
    (
        "enable-sleep-mode sleep-mode-offload-cudagraph sleep-preserve-parameter-names enable-cumem-allocator "
        "enable-nccl-comm-suspend sleep-mode-backend",
        "lets vLLM give its memory back while it sleeps; here an operator can pause the server, which keeps its memory",
    ),
    (
        "enable-shm-tensor-arena renderer-num-workers",
        "sets how vLLM's processes prepare and pass on inputs; here the API process does that, with threads of its own",
    ),
    (
        "weight-transfer-config",
        "lets vLLM replace its weights while it runs; here a server with the new weights is started",
    ),
    # ------------------------------------------------------------------ KV
    (
        "kv-transfer-config kv-offloading-backend",
        "chooses vLLM's connector for KV outside the GPU; here --kv-offload-bytes keeps evicted KV in host memory, and "
        "--kv-store keeps it on disk for other engines",
    ),
    (
        "swap-space",
        "is no longer an option of vLLM; here --kv-offload-bytes keeps evicted KV in host memory, and "
        "--preemption-mode swap uses it for preempted requests",
    ),
    (
        "prefix-caching-hash-algo prefix-match-unit prefix-cache-retention-interval",
        "sets how vLLM finds cached prefixes; here the tokens of a prefix are compared, in blocks of --block-size "
        "tokens, and --eviction chooses what is evicted first",
    ),
    (
        "kv-cache-dtype-skip-layers kv-sharing-fast-prefill swa-bounded-replay disable-sliding-window",
        "changes which layers of vLLM keep KV, and of which type; here --kv-cache-dtype holds for all layers, and "
        "--disable-hybrid-kv-cache-manager keeps whole contexts in layers with windows",
    ),
    # ------------------------------------------------------------------ scheduler
    (
        "scheduler-cls",
        "chooses the scheduler of vLLM; here the scheduler is Pointsman's, and --order, --victim and --reserve choose "
        "its policies",
    ),
    (
        "max-num-queued-reqs",
        "bounds the waiting and running requests of vLLM together; here --max-waiting-requests bounds those beyond "
        "--max-num-seqs: give the difference",
    ),
    (
        "max-num-scheduled-tokens",
        "is vLLM's token budget without room for drafts; here --max-num-batched-tokens is the budget, drafts included",
    ),
    (
        "prefill-schedule-interval",
        "lets vLLM admit prompts only every few steps; here --token-limit prefill-gap and target-itl bound how prompts "
        "delay decodes",
    ),
    # ------------------------------------------------------------------ drafts
    (
        "spec-method spec-model",
        "chooses how vLLM makes drafts; here drafts come from prompt lookup (ngram): give --num-draft-tokens",
    ),
    # ------------------------------------------------------------------ API
    (
        "enable-auto-tool-choice tool-call-parser tool-parser-plugin tool-strict-level tool-server "
        "exclude-tools-when-tool-choice-none",
        'is for tool calls, which vLLM parses; here tools reach the chat template, and the call is in the text: send '
        '"tool_choice": "none" and parse it',
    ),
    (
        "reasoning-parser reasoning-parser-plugin reasoning-config reasoning-effort-map cohere-is-reasoning-model "
        "cohere-format anthropic-disabled-thinking-effort",
        "is for thoughts of a model, which vLLM separates from its text; here they stay in the text: clients separate "
        "them, or switch them off with chat_template_kwargs or reasoning_effort",
    ),
    (
        "structured-outputs-config",
        "chooses vLLM's backend of structured outputs; here there is one, and --grammar-timeout bounds its work",
    ),
    (
        "chat-template-content-format trust-request-chat-template default-chat-template-kwargs",
        "sets what vLLM passes to a chat template; here content is text, --chat-template replaces the template, and "
        "clients send chat_template_kwargs",
    ),
    (
        "logits-processors",
        "adds functions that change vLLM's logits; here clients send logit_bias, penalties or a grammar",
    ),
    (
        "logprobs-mode",
        "chooses which log probabilities vLLM returns; here they are those of the model, before temperature and "
        "penalties: leave it out",
    ),
    (
        "enable-return-routed-experts return-sampling-mask aux-output-config enable-trace-replay",
        "makes vLLM return or force more than tokens and log probabilities; there is no such output here: leave it out",
    ),
    ("watermark-config", "marks the texts of vLLM; texts are not marked here (--watermark is for KV blocks)"),
    (
        "return-tokens-as-token-ids",
        'makes vLLM write tokens as "token_id:N"; here clients ask for ids with "return_token_ids": true',
    ),
    (
        "enable-prompt-tokens-details",
        "makes vLLM report cached prompt tokens; here every usage has prompt_tokens_details.cached_tokens",
    ),
    (
        "enable-force-include-usage",
        'makes vLLM send usage in every stream; here clients ask with "stream_options": {"include_usage": true}',
    ),
    (
        "enable-per-request-metrics",
        "adds times to each response of vLLM; here /metrics has them, and --log-request-events keeps them per request",
    ),
    (
        "sse-keep-alive-interval",
        "makes vLLM send comments in an idle stream; here nothing is sent until a token is there: raise the proxy's "
        "timeout",
    ),
    ("fingerprint-mode fingerprint-value", "sets system_fingerprint in vLLM's responses; responses here have none"),
    (
        "enable-tokenizer-info-endpoint tokens-only enable-scale-out enable-offline-docs disable-fastapi-docs",
        "adds or removes endpoints of vLLM; the endpoints here are fixed: docs/reference/http_api.md lists them",
    ),
    ("enable-server-load-tracking", "adds /load to vLLM; here /metrics has the running and the waiting requests"),
    ("enable-flash-late-interaction", "is for scores of late interaction, which this server does not compute"),
    (
        "enable-request-id-headers",
        "makes vLLM return X-Request-Id; here every response of a completion has this header",
    ),
    ("middleware", "adds Python code to vLLM's server; here a proxy in front of the server does that"),
    ("root-path", "is the path under which a proxy serves vLLM; here let the proxy remove the path"),
    (
        "allow-credentials allowed-origins allowed-methods allowed-headers",
        "lets pages of other sites call vLLM (CORS); here a proxy in front of the server adds these headers",
    ),
    (
        "ssl-keyfile ssl-certfile ssl-ca-certs enable-ssl-refresh ssl-cert-reqs ssl-ciphers",
        "gives vLLM's server TLS; here a proxy in front of the server does TLS (docs/guides/secure_a_server.md)",
    ),
    ("uds", "lets vLLM listen on a Unix socket; here give --host and --port; 127.0.0.1 is for this machine only"),
    ("grpc grpc-port", "makes vLLM serve gRPC; here the server speaks HTTP only"),
    (
        "h11-max-incomplete-event-size h11-max-header-count",
        "bounds the headers that vLLM reads; here that bound is fixed, and --max-request-bytes bounds bodies",
    ),
    # ------------------------------------------------------------------ logs and measurements
    (
        "enable-log-requests",
        "logs the ids and parameters of requests in vLLM; here --log-requests does so with the prompts, and "
        "--log-request-events keeps the times of each request without them: give one of these",
    ),
    ("max-log-len", "shortens prompts in vLLM's log; here the log has no prompts, unless --log-requests is given"),
    ("enable-log-outputs", "logs what vLLM generates; outputs are not logged here"),
    ("enable-log-deltas", "logs each streamed piece of vLLM's outputs; outputs are not logged here"),
    (
        "uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints",
        "sets the log of vLLM's HTTP server; here it reports warnings only, and has no line for each request",
    ),
    (
        "aggregate-engine-logging",
        "sets whether vLLM's lines of statistics are of all engines; here each engine has its own, every "
        "--log-stats-interval seconds",
    ),
    (
        "log-level log-config-file logging-config log-error-stack",
        "sets what vLLM logs; the log here goes to stderr, one line an event",
    ),
    (
        "show-hidden-metrics-for-version kv-cache-metrics kv-cache-metrics-sample custom-histogram-buckets "
        "cudagraph-metrics enable-mfu-metrics per-request-spec-decode-metrics",
        "chooses further metrics of vLLM; the metrics here are fixed: docs/reference/metrics.md lists them",
    ),
    (
        "otlp-traces-endpoint collect-detailed-traces enable-layerwise-nvtx-tracing enable-logging-iteration-details "
        "profiler-config jit-monitor-mode jit-monitor-verbose",
        "traces or profiles vLLM; here --record writes every decision, and pointsman film and plot show them",
    ),
    (
        "watchdog-config",
        "sets when a vLLM that makes no progress logs its stacks; here --watchdog-seconds reports such requests, and "
        "--engine-timeout ends such an engine",
    ),
    (
        "additional-config",
        "is for plugins of vLLM, such as this scheduler; here its settings are options: pointsman serve --help",
    ),
    (
        "fail-on-environ-validation",
        "checks the variables that begin with VLLM_; no such variable is read here",
    ),
)  # fmt: skip
EXPLAINED: Mapping[str, str] = MappingProxyType({name: text for names, text in _GROUPS for name in names.split()})
"""What an option does in vLLM, and what does that here."""

HARMLESS = _names(
    """
    aggregate-engine-logging api-server-count compilation-config cudagraph-capture-sizes
    disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
    disable-fastapi-docs disable-uvicorn-access-log distributed-executor-backend enable-flashinfer-autotune
    enable-log-deltas enable-prompt-tokens-details enable-request-id-headers fail-on-environ-validation jit-monitor-mode
    jit-monitor-verbose kernel-config language-model-only limit-mm-per-prompt linear-backend log-error-stack log-level
    max-cudagraph-capture-size max-log-len max-parallel-loading-workers mm-encoder-attn-backend mm-encoder-attn-dtype
    mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type
    mm-processor-device mm-shm-cache-max-object-size-mb mm-tensor-ipc moe-backend monokernel numa-bind
    optimization-level performance-mode prefix-caching-hash-algo pt-load-map-location renderer-num-workers
    safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads
    show-hidden-metrics-for-version skip-mm-profiling swa-bounded-replay use-tqdm-on-load uvicorn-log-level
    """
)
"""Options that can change no output, because they set the speed, the limits or the log of parts that only vLLM has, or
switch on what this server does anyway. They are accepted with a warning."""

ALREADY: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        name: frozenset(values.split())
        for name, values in {
            "tensor-parallel-size": "1", "pipeline-parallel-size": "1", "decode-context-parallel-size": "1",
            "prefill-context-parallel-size": "1", "nnodes": "1", "node-rank": "0", "data-parallel-backend": "mp",
            "runner": "auto generate", "convert": "auto none", "tokenizer-mode": "auto hf",
            "load-format": "auto safetensors", "config-format": "auto hf", "model-impl": "auto transformers",
            "generation-config": "auto", "spec-method": "ngram", "cpu-offload-gb": "0",
            "kv-offloading-backend": "native",
            "logprobs-mode": "raw_logprobs", "chat-template-content-format": "auto string",
            "mamba-cache-dtype": "auto", "mamba-ssm-cache-dtype": "auto", "sse-keep-alive-interval": "0",
        }.items()
    }
)  # fmt: skip
"""Values with which an option asks for what happens here anyway. They are accepted without a warning."""

_FLAGS = _names(
    """
    aggregate-engine-logging allow-credentials allow-deprecated-quantization async-scheduling cohere-is-reasoning-model
    cudagraph-metrics data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
    dcp-q-replicate exclude-tools-when-tool-choice-none fail-on-environ-validation fully-sharded-loras grpc headless
    interleave-mm-strings jit-monitor-verbose kv-cache-metrics kv-sharing-fast-prefill language-model-only
    log-error-stack mm-device-do-normalize mm-encoder-only monokernel numa-bind ray-workers-use-nsight
    return-sampling-mask return-tokens-as-token-ids scheduler-reserve-full-isl skip-mm-profiling skip-tokenizer-init
    sleep-mode-offload-cudagraph specialize-active-lora swa-bounded-replay tokens-only trust-remote-code
    trust-request-chat-template trust-request-mm-kwargs use-fp64-gumbel use-replayssm use-tqdm-on-load
    """
)
"""Flags of `EXPLAINED` and `RENAMED`; besides these, all names with enable- or disable- but for `_NOT_FLAGS`."""
_NOT_FLAGS = frozenset({"disable-access-log-for-endpoints"})
MANY = _names(
    """
    allowed-media-domains api-key collect-detailed-traces cpu-offload-params cudagraph-capture-sizes ignore-patterns
    kv-cache-dtype-skip-layers logits-processors lora-modules lora-target-modules numa-bind-cpus numa-bind-nodes
    offload-params served-model-name sleep-preserve-parameter-names
    """
)
"""Options that take several values after one name."""


def is_flag(name: str) -> bool:
    """Whether an option of `EXPLAINED` or `RENAMED` takes no value."""
    return name in _FLAGS or (name.startswith(("enable-", "disable-")) and name not in _NOT_FLAGS)


def find(name: str) -> tuple[str, bool] | None:
    """The name in the tables of an option, and whether the option switches this name on.

    Args:
        name: the option without hyphens in front, as vLLM takes it: also short, with underscores, with a field after a
            dot, or as the opposite of a flag.

    Returns:
        None: `vllm serve` has no such option.
    """
    name = name.partition(".")[0]
    if name in SHORT:
        return SHORT[name], True
    name = name.replace("_", "-")
    bare = name.removeprefix("no-")
    is_negated = bare != name
    candidates = {name: True, _opposite(bare): is_negated, bare: not is_negated}
    for candidate, is_on in candidates.items():
        if candidate in SAME or candidate in RENAMED or candidate in EXPLAINED:
            return candidate, is_on
    return None


def explanation(name: str) -> str | None:
    """One sentence about an option of `vllm serve` that `pointsman serve` lacks under this name; None: there is no such
    option."""
    found = find(name)
    if found is None or found[0] in SAME:
        return None
    if found[0] in RENAMED:
        return f"--{found[0]} of vLLM is --{RENAMED[found[0]].name} here"
    return f"--{found[0]} {EXPLAINED[found[0]]}"


def translate(arguments: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """The arguments of `pointsman serve` that mean the same as the given ones, in which options of `vllm serve` may
    stand. Warnings about options without an effect are printed.

    Args:
        takes_value: the options of `pointsman serve` -> whether the option takes a value.

    Raises:
        CommandError: an option has no meaning here, or contradicts another one.
    """
    return list(_Translation(arguments, takes_value).run())


class _Translation:
    def __init__(self, arguments: Sequence[str], takes_value: Mapping[str, bool]) -> None:
        self._arguments = list(arguments)
        self._takes_value = takes_value
        self._place = 0
        self._given: dict[str, tuple[str, str | None, bool]] = {}

    def run(self) -> Iterator[str]:
        while self._place < len(self._arguments):
            text = self._arguments[self._place]
            self._place += 1
            if text == "--":
                yield text
                yield from self._arguments[self._place :]
                return
            if not text.startswith("-") or text == "-" or re.match(r"-[0-9.]", text):
                yield text
            else:
                yield from self._option(text)

    def _option(self, text: str) -> Iterator[str]:
        option, has_value, value = text.partition("=")
        given = value if has_value else None
        if re.fullmatch(r"-O[0-9]", option):
            option, given = "-O", option[2:]
        name = option.lstrip("-")
        is_short = not option.startswith("--")
        own = option if is_short else f"--{name.replace('_', '-')}"
        if own in self._takes_value:
            yield from self._own(own, given)
            return
        found = find(name) if not is_short or name.partition(".")[0] in SHORT else None
        if found is None:
            yield text
            return
        name, is_on = found
        if "." in option:
            self._refuse_field(option, name)
        if name in SAME:
            flags = [f"--{name}"] if is_on else [f"--no-{name}"]
            yield from self._own(flags[0], given)
        elif name in RENAMED:
            yield from self._renamed(option, name, is_on, given)
        else:
            self._explain(option, name, is_on, given)

    @staticmethod
    def _refuse_field(option: str, name: str) -> None:
        if name in SAME:
            raise CommandError(
                f"{option} sets one field of --{name}; write all fields as one JSON object: --{name} JSON"
            )
        if name not in HARMLESS:
            raise CommandError(f"{option}: --{name} {EXPLAINED.get(name, 'takes no fields here')}")

    def _own(self, option: str, value: str | None) -> Iterator[str]:
        """An option of ours, with its values as Typer takes them."""
        name = option.removeprefix("--")
        if not self._takes_value.get(option, True):
            self._check_once(option, name.removeprefix("no-"), option, is_renamed=False)
            yield option if value is None else f"{option}={value}"
            return
        values = [self._next() if value is None else value]
        while value is None and name in MANY and self._has_value():
            values.append(self._next())
        for each in values:
            if each is None:
                yield option  # Typer reports the missing value
                return
            each = _whole(each) if name in _WHOLE else _DTYPES.get(each, each) if name == "dtype" else each
            if name not in MANY:
                self._check_once(option, name, each, is_renamed=False)
            yield from (option, each)

    def _renamed(self, option: str, name: str, is_on: bool, value: str | None) -> Iterator[str]:
        renamed = RENAMED[name]
        if renamed.on or renamed.off:
            parts = renamed.on if is_on else renamed.off
            if parts:
                own = parts[0].removeprefix("--").removeprefix("no-")
                self._check_once(option, own, parts[-1], is_renamed=True)
            yield from parts
            return
        value = self._next() if value is None else value
        if value is None:
            raise CommandError(f"{option} needs a value; it is --{renamed.name} here")
        ours = renamed.convert(value)
        self._check_once(option, renamed.name, ours, is_renamed=True)
        yield from (f"--{renamed.name}", ours)

    def _explain(self, option: str, name: str, is_on: bool, value: str | None) -> None:
        values = [value] if value is not None else []
        if not values and not is_flag(name):
            while self._has_value() and (not values or name in MANY):
                values += [self._arguments[self._place]]
                self._place += 1
        if name in ALREADY and values and set(values) <= ALREADY[name]:
            return
        if name not in HARMLESS and (is_on or not is_flag(name)):
            raise CommandError(f"{option} {EXPLAINED[name]}" if is_on else f"{option}: --{name} {EXPLAINED[name]}")
        subject = "it" if option == f"--{name}" else f"--{name}"
        print(f"pointsman: warning: {option} has no effect: {subject} {EXPLAINED[name]}", file=sys.stderr)

    def _next(self) -> str | None:
        if self._place == len(self._arguments):
            return None
        self._place += 1
        return self._arguments[self._place - 1]

    def _has_value(self) -> bool:
        return self._place < len(self._arguments) and not re.match(r"-(?![0-9.])", self._arguments[self._place])

    def _check_once(self, option: str, name: str, value: str, *, is_renamed: bool) -> None:
        """Refuse an option that was given before with another value, if one of the two has vLLM's name."""
        before = self._given.get(name)
        if before is not None and before[1] != value and (is_renamed or before[2]):
            raise CommandError(f"{before[0]} and {option} set the same, with different values; give one of them")
        self._given[name] = option, value, is_renamed or (before is not None and before[2])


def _opposite(name: str) -> str:
    """The name of a flag with enable- in place of disable-, or the other way round; other names as they are."""
    if name.startswith("enable-"):
        return f"disable-{name.removeprefix('enable-')}"
    return f"enable-{name.removeprefix('disable-')}" if name.startswith("disable-") else name
