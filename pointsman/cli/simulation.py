"""Simulations: makes a workload and a service from options. Shared by `pointsman simulate`, `capacity` and `tune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pointsman.cli.durations import seconds as seconds
from pointsman.cli.errors import CommandError
from pointsman.cli.features import features_of_options
from pointsman.cli.knobs import scheduler_values, size
from pointsman.cli.simulator_options import SCHEDULER
from pointsman.core import SchedulerConfig
from pointsman.core.errors import PointsmanError
from pointsman.core.policy.registry import check_policies, fields_read
from pointsman.core.presets import NO_LIMIT, PRESETS, SYSTEMS
from pointsman.core.recording import check_num_blocks
from pointsman.core.state.layout import describe_groups
from pointsman.sim.cost import Cost, cost_of, prompt_share_of
from pointsman.sim.devices import DEVICES, Device, device
from pointsman.sim.disaggregation import KvTransfer
from pointsman.sim.errors import UnknownName
from pointsman.sim.features import PLAIN, Features
from pointsman.sim.fleet import ROUTINGS, Routing
from pointsman.sim.host_memory import HostMemory, check_host_memory
from pointsman.sim.hull import SeenLoads, WatchedStepTime, warn_outside
from pointsman.sim.memory import KvMemory, layer_groups, num_kv_blocks
from pointsman.sim.model import ModelShape
from pointsman.sim.profile import EngineSettings, Profile, load_profile
from pointsman.sim.report.summary import ITL_OF, ItlOf, Targets
from pointsman.sim.samples import GeneratedSamples, Samples, SessionSamples, TraceSamples, TraceUserSamples, UserSamples
from pointsman.sim.scenarios import SCENARIOS
from pointsman.sim.shapes import SHAPES, model_shape
from pointsman.sim.step_time import RooflineStepTime, StepTime, check_experts_divided
from pointsman.sim.topology import ONE_ENGINE, Topology
from pointsman.sim.trial import Judge, Source
from pointsman.sim.vllm_defaults import VLLM_VERSION, vllm_defaults
from pointsman.sim.workload import (
    Adapters,
    ClosedLoop,
    Generated,
    Lengths,
    OpenLoop,
    Sessions,
    Workload,
    WorkloadError,
    parse_adapters,
    parse_arrivals,
    parse_distribution,
    with_adapters,
)
from pointsman.traces import Trace, TraceRequest, about_left_out, read_trace, served

DEFAULTS = {"arrivals": "poisson:4", "prompt_tokens": "lognormal:1000,0.8", "output_tokens": "lognormal:130,0.8"}
"""Options of the built-in example, with typical lengths of a chat service; also the defaults of generated workloads."""
SESSION_DEFAULTS = {"turns": "uniform:2,8", "new_tokens": "lognormal:60,1"}
NUM_REQUESTS = 1000
MODEL, DEVICE = "Llama-3.1-8B", "h100"
UNKNOWN_MODEL = "MODEL"
"""Placeholder in a command, if neither an option nor the profile names the model."""
UNBOUNDED_MODEL_LEN = 131_072
"""Maximum tokens of a sequence if neither a model nor --max-model-len determines it."""

DEFAULT_ITL_OF: ItlOf = "pooled"

T = TypeVar("T")

# ---------------------------------------------------------------------- what arrives


@dataclass(frozen=True, slots=True)
class Arriving:
    """A workload that can be sped up or slowed down."""

    title: str
    at_speed: Callable[[float], Workload]
    """Function from a factor to the workload, sped up by this factor."""
    rate: float
    """Requests a second at speed 1; infinity: all requests arrive at one time, or the rate is not known in advance."""
    trace: Trace[TraceRequest] | None = None
    """All requests of the trace that can be served, and the number of rows left out; None: there is no trace."""

    @property
    def about_left_out(self) -> str:
        """The number of rows of the trace that were left out, and why; empty: none, or there is no trace."""
        return "" if self.trace is None else about_left_out(self.trace.num_rows, self.trace.left_out)


def workload_of_options(options: Mapping[str, Any], num_requests: int | None = None) -> Arriving:
    """The workload that the options describe.

    Args:
        options: the given options, by name.
        num_requests: maximum number of requests from the start, overrides the options; None: as in the options.

    Raises:
        CommandError: options contradict each other, or a value or a file is wrong.
    """
    _check_options(options)
    try:
        if "trace" in options:
            return _trace_workload(options, num_requests)
        if "sessions" in options:
            return _session_workload(options, num_requests)
        lengths, seed = _lengths(options), options.get("seed", 0)
        count = num_requests or options.get("requests", NUM_REQUESTS)
        if "users" in options:
            think = _parse_option(parse_distribution, "think", options)
            loop = ClosedLoop(options["users"], lengths, think=think, num_requests=count, seed=seed)
            title = f"{options['users']} users, {count:,} requests, {_lengths_text(options)}"
            return Arriving(title, lambda _: loop, math.inf)
        arrivals = _parse_option(parse_arrivals, "arrivals", options)
        generated = Generated(arrivals, lengths, count, seed)
    except (PointsmanError, ValueError) as error:
        raise CommandError(str(error)) from None
    return Arriving(
        f"{count:,} requests, arrivals {options.get('arrivals', DEFAULTS['arrivals'])}, {_lengths_text(options)}",
        lambda speed: OpenLoop(generated, rate=speed),
        arrivals.rate,
    )


def _lengths_text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.partition('_')[0]}s {options.get(name, DEFAULTS[name])}" for name in _LENGTHS)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A workload of which a search simulates samples."""

    title: str
    samples: Samples
    rate: float
    """Requests a second as the options or the trace have them; infinity: of users, not known."""
    is_of_users: bool = False
    """Whether the load of the samples is a number of users."""
    num_requests: int | None = None
    """Number of requests of a sample, as far as the options determine it."""
    about_trace: str = ""
    """Text about the trace; empty: there is none."""
    about_left_out: str = ""
    """The number of rows of the trace that were left out, and why; empty: none, or there is no trace."""


def samples_of_options(options: Mapping[str, Any], num_requests: int | None, *, finds_num_users: bool) -> Sampled:
    """The samples of the workload that the options describe.

    Args:
        num_requests: number of requests of a sample; None: chosen later, or by `--sessions`.
        finds_num_users: whether the requests come from users.

    Raises:
        CommandError: options contradict each other, or a value or a file is wrong.
    """
    _check_options(options, finds_num_users=finds_num_users)
    try:
        return _make_samples(options, num_requests, finds_num_users)
    except (PointsmanError, ValueError) as error:
        raise CommandError(str(error)) from None


def _make_samples(options: Mapping[str, Any], num_requests: int | None, finds_num_users: bool) -> Sampled:
    seed, think = options.get("seed", 0), _parse_option(parse_distribution, "think", options)
    if "trace" in options:
        trace = _read_served(options, None)
        rate, path = _mean_rate(trace), options["trace"]
        if rate == math.inf and not finds_num_users:
            raise CommandError(
                f"--trace is {path}, whose requests all arrive at the same time and so have no rate; give --arrivals "
                "instead"
            )
        of_trace: Samples = TraceUserSamples(trace, think, seed) if finds_num_users else TraceSamples(trace, rate)
        return Sampled(
            f"{len(trace):,} requests of {path}",
            of_trace,
            rate,
            finds_num_users,
            num_requests,
            _trace_text(trace),
            about_left_out(trace.num_rows, trace.left_out),
        )
    if "sessions" in options:
        sessions, arrivals = _sessions(options), _parse_option(parse_arrivals, "arrivals", options)
        per_session = max(1.0, sessions.num_turns.mean())
        turns = options.get("turns", SESSION_DEFAULTS["turns"])
        return Sampled(
            f"sessions with {turns} turns, {_lengths_text(options)}",
            SessionSamples(sessions, arrivals),
            arrivals.rate * per_session,
            num_requests=num_requests or round(options["sessions"] * per_session),
        )
    lengths, of_lengths = _lengths(options), _lengths_text(options)
    if finds_num_users:
        title = f"{of_lengths}, from users who think for {options.get('think', '0')} s"
        return Sampled(title, UserSamples(lengths, think, seed), math.inf, True, num_requests)
    arrivals = _parse_option(parse_arrivals, "arrivals", options)
    title = f"arrivals {options.get('arrivals', DEFAULTS['arrivals'])}, {of_lengths}"
    return Sampled(title, GeneratedSamples(arrivals, lengths, seed), arrivals.rate, num_requests=num_requests)


_LENGTHS = ("prompt_tokens", "output_tokens")
_NOT_WITH: dict[str, tuple[str, ...]] = {
    "trace": ("arrivals", "prompt_tokens", "output_tokens", "requests", "sessions", "turns", "new_tokens"),
    "sessions": ("users", "requests", "limit"),
    "users": ("arrivals", "rate"),
}
"""For each option, the options that cannot be given with it, because only one of the two could have an effect."""
_NEEDS: dict[str, tuple[str, ...]] = {
    "limit": ("trace",),
    "start": ("trace",),
    "think": ("users", "sessions"),
    "turns": ("sessions",),
    "new_tokens": ("sessions",),
    "retention": ("sessions",),
}


def _check_options(options: Mapping[str, Any], *, finds_num_users: bool = False) -> None:
    for name, least in {"limit": 1, "requests": 1, "sessions": 1, "users": 1, "seed": 0, "retention": 0}.items():
        if options.get(name, least) < least:
            raise CommandError(f"{_option_name(name)} is {options[name]}; it must be at least {least}")
    if not math.isfinite(retention := options.get("retention", 0)):
        raise CommandError(f"--retention is {retention}; it must be a number of seconds, at least 0")
    for name, others in _NOT_WITH.items():
        for other in others:
            if name in options and other in options:
                hint = "; --limit shortens a trace" if (name, other) == ("trace", "requests") else ""
                raise CommandError(
                    f"{_option_name(other)} has no effect beside {_option_name(name)}; give one of them{hint}"
                )
    if finds_num_users and "arrivals" in options:  # --users, if given, was refused above
        raise CommandError(
            "--arrivals has no effect with --think: a user's next request arrives a thinking time after the last "
            "output; leave one of them out, or add --sessions for conversations that start at these arrival times"
        )
    for name, wanted in _NEEDS.items():
        if name in options and not any(each in options or (each == "users" and finds_num_users) for each in wanted):
            raise CommandError(
                f"{_option_name(name)} has no effect alone; give {' or '.join(map(_option_name, wanted))} too"
            )


def _trace_workload(options: Mapping[str, Any], num_requests: int | None) -> Arriving:
    path = options["trace"]
    trace = _read_served(options, num_requests or options.get("limit"))
    title = f"{len(trace):,} requests of {path}"
    if "users" in options:
        think, seed = _parse_option(parse_distribution, "think", options), options.get("seed", 0)
        loop = ClosedLoop(options["users"], trace, think=think, seed=seed)
        return Arriving(f"{title} from {options['users']} users", lambda _: loop, math.inf, trace)
    return Arriving(title, lambda speed: OpenLoop(trace, rate=speed), _mean_rate(trace), trace)


def _read_served(options: Mapping[str, Any], limit: int | None) -> Trace[TraceRequest]:
    """The requests of the option `--trace`, from `--start` on.

    Raises:
        CommandError: the file cannot be read, or has no request after the start.
    """
    path, start = options["trace"], seconds("start", options.get("start"))
    try:
        trace = served(read_trace(path, limit=None if start else limit), path)
    except OSError as error:
        raise CommandError(f"cannot read the trace {path}: {error.strerror}") from None
    if start:
        later = [request for request in trace if request.arrival_time >= start][:limit]
        if not later:
            raise CommandError(
                f"--start is {options['start']}, but the last request of {path} arrives after "
                f"{trace[-1].arrival_time:.3g} s; give an earlier start"
            )
        first = later[0].arrival_time
        trace = Trace([replace(each, arrival_time=each.arrival_time - first) for each in later], trace.left_out)
    if (adapters := _adapters(options)) is not None:
        trace = Trace(with_adapters(trace, adapters, options.get("seed", 0)), trace.left_out)
    return trace


def _trace_text(trace: Sequence[TraceRequest]) -> str:
    minutes, rate = (trace[-1].arrival_time - trace[0].arrival_time) / 60, _mean_rate(trace)
    pace = f" in {minutes:.3g} min, {rate:.3g} a second" if rate < math.inf else ""
    return f"The trace has {len(trace):,} requests{pace}."


def _mean_rate(trace: Sequence[TraceRequest]) -> float:
    seconds = trace[-1].arrival_time - trace[0].arrival_time
    return (len(trace) - 1) / seconds if seconds > 0 else math.inf


def _session_workload(options: Mapping[str, Any], num_requests: int | None) -> Arriving:
    values = {name: options.get(name, default) for name, default in {**DEFAULTS, **SESSION_DEFAULTS}.items()}
    sessions = _sessions(options)
    per_session, count = max(1.0, sessions.num_turns.mean()), options["sessions"]
    if num_requests is not None:
        count = max(1, min(count, round(num_requests / per_session)))
    sessions = replace(sessions, num_sessions=count)
    return Arriving(
        f"{count:,} sessions, arrivals {values['arrivals']}, turns {values['turns']}, first prompts "
        f"{values['prompt_tokens']}, later ones {values['new_tokens']} more, outputs {values['output_tokens']}",
        lambda speed: replace(sessions, arrivals=_speed_up_arrivals(values["arrivals"], speed)),
        _parse_option(parse_arrivals, "arrivals", options).rate * per_session,
    )


def _sessions(options: Mapping[str, Any]) -> Sessions:
    return Sessions(
        arrivals=_parse_option(parse_arrivals, "arrivals", options),
        num_turns=_parse_option(parse_distribution, "turns", options),
        first_prompt=_parse_option(parse_distribution, "prompt_tokens", options),
        new_text=_parse_option(parse_distribution, "new_tokens", options),
        output=_parse_option(parse_distribution, "output_tokens", options),
        think=_parse_option(parse_distribution, "think", options),
        num_sessions=options["sessions"],
        retention=options.get("retention"),
        adapters=_adapters(options),
        seed=options.get("seed", 0),
    )


def _lengths(options: Mapping[str, Any]) -> Lengths:
    return Lengths(
        prompt=_parse_option(parse_distribution, "prompt_tokens", options),
        output=_parse_option(parse_distribution, "output_tokens", options),
        adapters=_adapters(options),
    )


def _adapters(options: Mapping[str, Any]) -> Adapters | None:
    """The popularity of adapters; None: no option gives adapters."""
    if "adapters" not in options:
        return None
    try:
        return parse_adapters(options["adapters"])
    except WorkloadError as error:
        raise CommandError(f"--adapters: {error}") from None


def _parse_option(parse: Callable[[str], T], name: str, options: Mapping[str, Any]) -> T:
    """The value of an option, parsed from the text that was given or from the text of the default."""
    try:
        return parse(options.get(name, {**DEFAULTS, **SESSION_DEFAULTS, "think": "0"}[name]))
    except WorkloadError as error:
        raise CommandError(f"{_option_name(name)}: {error}") from None


def _speed_up_arrivals(text: str, speed: float) -> Any:
    arrivals = parse_arrivals(text)
    return replace(arrivals, rate=arrivals.rate * speed)  # type: ignore[type-var]


# ---------------------------------------------------------------------- what serves it


@dataclass(frozen=True, slots=True)
class Service:
    """Replicas of a model on a device, with their memory and speed."""

    title: str
    config: SchedulerConfig
    step_time: StepTime
    routing: Callable[[], Routing]
    kv: KvMemory | None
    """The estimate of memory from which the number of blocks was computed; None: the number was given, or the pool is
    never short."""
    kv_text: str
    about_times: str
    """Text about the source of the step times, and their known error."""
    profile: Profile | None = None
    sized: Callable[[SchedulerConfig], SchedulerConfig] = lambda config: config
    """Function that sets in a configuration the number of blocks that fit the device; may raise `ModelTooLarge`."""
    settings_of: str = ""
    """Text for display: where the settings come from that no option gives, as "the preset"."""
    host_memory: HostMemory | None = None
    """Host memory behind the KV pool; None: no host memory."""
    features: Features = PLAIN
    """Drafts of the engine, and the cost of its adapters."""
    topology: Topology = ONE_ENGINE
    """The engines of each replica."""
    model: str = UNKNOWN_MODEL
    """The model to name in a server's command: a path, or a name with its organisation."""
    alternatives: tuple[StepTime, ...] = ()
    """Other step times that are about equally plausible, and span what is not known about the step times."""
    device: Device | None = None
    """The device; None: only a profile is known."""
    num_devices: int = 1
    """Number of devices of each replica."""

    def judge(self, source: Source, targets: Targets, seed: int = 0) -> Judge:
        """The judge of simulations of this service, with `alternatives` as its other step times.

        Args:
            source: of the workloads.
            seed: of the simulations' own draws, such as which drafts are accepted.
        """
        profile = self.profile
        return Judge(
            source=source,
            step_times=(self.best_step_time, *self.alternatives),
            targets=targets,
            routing=self.routing,
            seed=seed,
            host_memory=self.host_memory,
            features=self.features,
            topology=self.topology,
            request_overhead=0.0 if profile is None else profile.request_overhead,
        )

    @property
    def best_step_time(self) -> StepTime:
        """`step_time`, without a record of the simulated loads."""
        return self.step_time if self.profile is None else self.profile.bounded(self.profile.step_time)

    def cost(
        self,
        *,
        rate: float,
        prompt_tokens_per_second: float,
        output_tokens_per_second: float,
        busy: float,
        num_running: float,
        num_replicas: int,
        price_per_hour: float | None,
        config: SchedulerConfig | None = None,
    ) -> Cost:
        """Price and energy of the tokens at a rate.

        Args:
            rate: requests a second, above 0.
            prompt_tokens_per_second, output_tokens_per_second: of all replicas.
            busy: share of the time in which a replica runs a step.
            num_running: mean number of running requests of all replicas.
            num_replicas: number of replicas.
            price_per_hour: of one replica; None: unknown.
            config: of each replica's scheduler; None: that of the service.
        """
        device, limits = self.device, config or self.config
        return cost_of(
            prompt_tokens_per_second=prompt_tokens_per_second,
            output_tokens_per_second=output_tokens_per_second,
            busy=min(1.0, busy),
            num_devices=self.num_devices * num_replicas,
            price_per_hour=None if price_per_hour is None else price_per_hour * num_replicas,
            watts=device.watts if device is not None and device.board_watts else None,
            prompt_share=prompt_share_of(
                self.best_step_time,
                prompt_tokens=prompt_tokens_per_second / rate,
                output_tokens=output_tokens_per_second / rate,
                num_running=min(num_running / (num_replicas * self.topology.num_engines), limits.max_num_seqs),
                max_num_batched_tokens=limits.max_num_batched_tokens,
            ),
        )

    def extrapolations(self, seen: SeenLoads | None = None) -> list[str]:
        """A sentence on where steps had other loads than the profile's log; no sentence if they had the same loads.

        Args:
            seen: the loads of the steps; None: those of the simulations with `step_time` since the last call.
        """
        if self.profile is None:
            return []
        if seen is None:
            if not isinstance(self.step_time, WatchedStepTime):
                return []
            seen = self.step_time.take_seen()
        return [f"{warning[:1].upper()}{warning[1:]}." for warning in warn_outside(self.profile, seen)]


def service_of_options(options: Mapping[str, Any], preset: str | None, *, as_vllm: bool = False) -> Service:
    """The service that the options describe.

    Args:
        as_vllm: if token budget or sequence limit is not given, use vLLM's default on the device; if only a profile is
            known, the value of its engine.

    Raises:
        CommandError: a name or a value is wrong, or the model does not fit the device.
    """
    try:
        service = _make_service(options, preset, as_vllm)
        check_policies(service.config)
        if "retention" in options:
            _check_retention_is_read(options["retention"], str(service.config.eviction))
        return service
    except (PointsmanError, ValueError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot read {error.filename}: {error.strerror}") from None


def _check_retention_is_read(retention: float, eviction: str) -> None:
    if "retention" not in fields_read({"eviction": eviction}):
        raise CommandError(
            f"--retention is {retention:g}, but the eviction policy {eviction} does not read it; leave it out, or add "
            "--eviction retention"
        )


def _make_service(options: Mapping[str, Any], preset: str | None, as_vllm: bool) -> Service:
    name = options.get("routing", "round-robin")
    if name not in ROUTINGS:
        raise UnknownName(f"no routing rule is called {name!r}; choose one of {', '.join(ROUTINGS)}")
    knobs = scheduler_values({knob: options[knob] for knob in SCHEDULER if knob in options})
    # A profile already has the step times; model and device then only determine the number of blocks.
    profile = load_profile(options["profile"]) if "profile" in options else None
    if "num_blocks" in knobs and "gpu_memory_utilization" in options:
        raise CommandError("--gpu-memory-utilization has no effect beside --num-blocks; give one of them")
    has_model = profile is None or "model" in options or "device" in options
    shape = model_shape(options.get("model", MODEL)) if has_model else None
    longest = UNBOUNDED_MODEL_LEN if shape is None else shape.max_model_len
    if shape is not None and knobs.get("max_model_len", 0) > longest:
        raise CommandError(
            f"--max-model-len is {knobs['max_model_len']}; {shape.name} supports at most {longest} tokens; lower it"
        )
    if profile is not None:
        knobs = {**_knobs_of_profile(profile.settings, longest), **knobs}
        if has_model and "num_blocks" not in options:  # blocks are then those of the model's groups, see `KvMemory`
            knobs.pop("num_blocks", None)
            knobs.pop("kv_groups", None)
    has_hybrid_manager = not options.get("disable_hybrid_kv_cache_manager", False)
    if shape is None and not has_hybrid_manager:
        raise CommandError("--disable-hybrid-kv-cache-manager has no effect without a model's layers; give --model")
    groups = None if shape is None else layer_groups(shape, has_hybrid_manager=has_hybrid_manager)
    if groups is not None:
        knobs.setdefault("kv_groups", groups.kv_groups)
    parallel = options.get("tensor_parallel", 1)
    on = None if shape is None else device(options.get("device", DEVICE))
    settings_of = "the preset" if profile is None else "the profile's engine"
    if as_vllm and shape is not None and on is not None:
        of_vllm = vllm_defaults(on, knobs.get("max_model_len", longest), parallel)
        given = {knob: options[knob] for knob in of_vllm._fields if knob in options}
        knobs = {**knobs, **of_vllm._asdict(), **given}
        if "max_num_seqs" not in given:
            knobs["max_num_seqs"] = min(knobs["max_num_seqs"], knobs["max_num_batched_tokens"])  # as vLLM does
        settings_of = f"vLLM {VLLM_VERSION} on {on.name}"
    if "adapters" in options:
        knobs.setdefault("max_loras", 1)
    if knobs.get("num_draft_tokens") and "max_steps_in_flight" not in options:
        knobs["max_steps_in_flight"] = 1  # as engines do, because drafts are verified only with one step in flight
    base = preset or ("default" if profile is None else "vllm")
    config = SchedulerConfig.preset(base, **{"num_blocks": 1, "max_model_len": longest, **knobs})
    kv: KvMemory | None = None
    step_time: StepTime
    if shape is None or on is None:
        title = f"the profile {options['profile']}"
        estimated = None
    else:
        estimated = RooflineStepTime(
            shape=shape,
            device=on,
            tensor_parallel=parallel,
            data_parallel=_data_parallel_size(options, profile) if shape.num_experts else 1,
            has_expert_parallel=options.get("enable_expert_parallel", False),
        )
        title = f"{shape.name} on {f'{parallel} x ' if parallel > 1 else ''}{on.name}"
    alternatives: tuple[StepTime, ...]
    if profile is not None:
        if profile.bound is None:
            profile = replace(profile, bound=estimated)
        step_time, about_times = WatchedStepTime(profile.bounded(profile.step_time)), _profile_text(profile)
        alternatives = tuple(map(profile.bounded, profile.alternatives))
    else:
        assert estimated is not None
        step_time, about_times, alternatives = estimated, estimated.caveat(), estimated.alternatives()

    host_memory = None
    if "kv_offload_bytes" in options:
        if shape is None or on is None:
            raise CommandError(
                "--kv-offload-bytes needs the model's KV size and the device's bandwidth to its host; give --model and "
                "--device"
            )
        num_bytes, layers = size(options["kv_offload_bytes"], "kv_offload_bytes"), _layers_per_block(shape, config)
        host_memory = HostMemory.of(num_bytes, shape, on, parallel, layers_per_block=layers)
    check_host_memory(host_memory, config)
    measured = () if profile is None else (profile.speculation, profile.adapter_share)
    features = features_of_options(options, config, *measured)
    topology = _topology(options, shape, on, config, profile)
    topology.check(config, host_memory)

    def memory(config: SchedulerConfig) -> KvMemory:
        assert shape is not None and on is not None
        usable = options.get("gpu_memory_utilization", 0.9)
        largest_step = _largest_step(config)
        found = num_kv_blocks(
            shape,
            on,
            config.block_size,
            usable,
            parallel,
            has_hybrid_manager=has_hybrid_manager,
            data_parallel=topology.data_parallel_size if topology.is_lockstep else 1,
            **largest_step,
        )
        check_num_blocks(found.num_blocks)
        return found

    def sized(config: SchedulerConfig) -> SchedulerConfig:
        if "num_blocks" in knobs:
            return config
        if shape is not None:
            return config.replace(num_blocks=memory(config).num_blocks)
        return config.replace(
            num_blocks=config.num_sequence_slots * -(-config.max_model_len // config.block_size)
        )  # enough blocks for every request

    if "num_blocks" in knobs:
        given_by = "given" if "num_blocks" in options else "the engine of the profile had"
        kv_text = f"{config.num_blocks:,} KV blocks of {config.block_size} tokens, as {given_by}"
        if config.has_kv_groups:
            kv_text += f", in {describe_groups(config.kv_groups)}.{_full_length_text(config)}"
    elif shape is not None:
        kv = memory(config)
        kv_text = f"{kv}".rstrip() + _full_length_text(config.replace(num_blocks=kv.num_blocks))
    else:
        kv_text = (
            "never short, because their number is not known: give --num-blocks as the engine's log "
            "reports them, or --model and --device"
        )
    return Service(
        title + _topology_text(topology),
        sized(config),
        step_time,
        ROUTINGS[name],
        kv,
        kv_text,
        about_times,
        profile,
        sized,
        settings_of,
        host_memory,
        features,
        topology,
        _served_model(options, shape, profile),
        alternatives,
        on,
        parallel * topology.num_engines,
    )


def check_routing(options: Mapping[str, Any], replicas: int) -> None:
    """Check that a routing rule has something to choose from.

    Raises:
        CommandError: it has not.
    """
    if replicas == 1 and "routing" in options and "prefill_replicas" not in options:
        raise CommandError("--routing has no effect with one replica; give --replicas 2 or more")


def _topology(
    options: Mapping[str, Any],
    shape: ModelShape | None,
    on: Device | None,
    config: SchedulerConfig,
    profile: Profile | None,
) -> Topology:
    """The engines of each replica."""
    ranks, has_expert_parallel = _data_parallel_size(options, profile), options.get("enable_expert_parallel", False)
    if shape is not None and on is not None:
        has_experts = shape.num_experts > 0
        check_experts_divided(shape, on, ranks if has_experts else 1, has_expert_parallel=has_expert_parallel)
    else:
        has_experts = has_expert_parallel or (profile is not None and _has_experts(profile))
    prefill, decode = options.get("prefill_replicas", 0), options.get("decode_replicas", 0)
    transfer, given = None, [name for name in ("kv_transfer_bandwidth", "kv_transfer_latency") if name in options]
    if prefill and decode:
        if shape is None or on is None:
            raise CommandError("--prefill-replicas needs the model's KV size; give --model and --device")
        transfer = KvTransfer.of(
            shape,
            on,
            options.get("tensor_parallel", 1),
            bandwidth=size(options[given[0]], given[0]) if "kv_transfer_bandwidth" in options else None,
            latency=seconds("kv_transfer_latency", options.get("kv_transfer_latency")) or 0.0,
            layers_per_block=_layers_per_block(shape, config),
        )
    elif given:
        raise CommandError(f"{_option_name(given[0])} has no effect without --prefill-replicas and --decode-replicas")
    return Topology(
        data_parallel_size=ranks,
        is_lockstep=has_experts and ranks > 1,
        prefill_replicas=prefill,
        decode_replicas=decode,
        transfer=transfer,
        role_routing=ROUTINGS[options.get("routing", "round-robin")],
    )


def _data_parallel_size(options: Mapping[str, Any], profile: Profile | None) -> int:
    of_profile = 1 if profile is None else profile.settings.data_parallel_size
    size: int = options.get("data_parallel_size", of_profile)
    return size


def _has_experts(profile: Profile) -> bool:
    """Whether ranks with the profile's step times step together."""
    settings = profile.settings
    return settings.is_lockstep if settings.data_parallel_size > 1 else profile.step_time.expert_weights > 0


def _topology_text(topology: Topology) -> str:
    text = ""
    if topology.is_disaggregated:
        text += f", {topology.prefill_replicas} prefill and {topology.decode_replicas} decode engines"
    if topology.data_parallel_size > 1:
        together = " that step together" if topology.is_lockstep else ""
        text += f"{' of' if text else ','} {topology.data_parallel_size} data parallel ranks{together}"
        text += " each" if topology.is_disaggregated else ""
    return text


def _full_length_text(config: SchedulerConfig) -> str:
    """The number of tokens that groups of layers hold, as vLLM's log reports it."""
    if not config.has_kv_groups:
        return ""
    return f" They hold {config.num_full_length_tokens:,} tokens of requests of {config.max_model_len:,} tokens."


def _layers_per_block(shape: ModelShape, config: SchedulerConfig) -> int:
    """Number of layers whose KV a block holds. Of a profile's groups only their number is known."""
    groups = layer_groups(shape, has_hybrid_manager=config.has_kv_groups)
    if config.kv_groups == groups.kv_groups:
        return groups.num_layers
    return -(-shape.num_layers // max(1, len(config.kv_groups)))


def _served_model(options: Mapping[str, Any], shape: ModelShape | None, profile: Profile | None) -> str:
    """The model to name in a server's command: the given model, or the profile's model."""
    given = options.get("model", MODEL)
    if shape is not None:
        return given if Path(given).exists() else shape.name
    return (profile.model if profile is not None else "") or UNKNOWN_MODEL


def _largest_step(config: SchedulerConfig) -> dict[str, int]:
    """The token budget and the sequence limit of a step, as arguments of `num_kv_blocks`. A limit that the preset
    switches off is left out; `num_kv_blocks` then uses its own default."""
    sizes = {"max_num_batched_tokens": config.max_num_batched_tokens, "max_num_seqs": config.max_num_seqs}
    return {name: size for name, size in sizes.items() if size < NO_LIMIT}


def _knobs_of_profile(settings: EngineSettings, longest: int) -> dict[str, Any]:
    """The scheduler knobs of the engine whose log was profiled: the step times are valid for these knobs."""
    knobs: dict[str, Any] = {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "block_size": settings.block_size,
        "max_steps_in_flight": 2 if settings.async_scheduling else 1,
        "num_draft_tokens": settings.num_draft_tokens,
        "max_loras": settings.max_loras,
        "prefill_interval": settings.prefill_interval,
    }
    if settings.num_blocks is not None:
        knobs |= {"num_blocks": settings.num_blocks, "kv_groups": settings.kv_groups}
    if settings.max_model_len is not None:
        knobs["max_model_len"] = min(settings.max_model_len, longest)
    return knobs


def _profile_text(profile: Profile) -> str:
    error = profile.held_out_errors.get("e2e_mape", profile.held_out_errors.get("step_mape"))
    what = "end-to-end times" if "e2e_mape" in profile.held_out_errors else "steps"
    off = f"; they predict its other {what} to {error:.1%} on average" if error is not None else ""
    return f"Step times are fitted to {profile.source}{off}."


# ---------------------------------------------------------------------- values, names


def device_names(options: Mapping[str, Any]) -> list[str | None]:
    """The devices of the option `--device`, one or several; [None] if it is not given. A description of a device has
    commas itself, so it is one device.

    Raises:
        CommandError: several devices are given with a profile, or one is empty.
    """
    text = options.get("device")
    if text is None or "=" in text:
        return [text]
    names: list[str | None] = [name.strip() for name in text.split(",")]
    if not all(names):
        raise CommandError(f"--device is {text!r}; give names with commas between them, like h100,l40s")
    if len(names) > 1 and "profile" in options:
        raise CommandError("--profile has the step times of one device; give one --device, or leave --profile out")
    return names


def device_prices(text: str | None, num_devices: int) -> list[float | None]:
    """The price per hour of a replica on each device, from the option `--price-per-hour`; None: not given.

    Raises:
        CommandError: a price is no number of 0 or more, or there is not one for each device.
    """
    if text is None:
        return [None] * num_devices
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= price < math.inf for price in found):
        raise CommandError(
            f"--price-per-hour is {text!r}; give a number of 0 or more, or one for each device, like 3,1.2"
        )
    if len(found) != num_devices:
        raise CommandError(
            f"--price-per-hour has {len(found)} prices for {num_devices} devices; give a price for each device"
        )
    return [*found]


def targets_of_options(options: Mapping[str, Any], *names: str) -> Targets:
    """The targets that the options give, by `names` of the options for TTFT, ITL and end-to-end time.

    Raises:
        CommandError: a target is no time, or `--itl-of` is no kind of ITL or has no target beside it.
    """
    limits = [seconds(name, options.get(name)) for name in names]
    itl_of = options.get("itl_of", DEFAULT_ITL_OF)
    if itl_of not in ITL_OF:
        raise CommandError(f"--itl-of is {itl_of!r}; give one of {', '.join(ITL_OF)}")
    if "itl_of" in options and limits[1] is None:
        raise CommandError(f"--itl-of has no effect without a target; give {_option_name(names[1])} too")
    ttft, itl, e2e = (*limits, None)[:3]
    return Targets(ttft, itl, e2e, itl_of)


def _option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def names() -> str:
    """The available models, devices, scenarios, routing rules and presets, as text."""
    lines = ["Models (name, parameters, maximum tokens of a sequence, source):"]
    lines += [f"  {_describe_shape(shape)}" for shape in SHAPES.values()]
    lines += ["", "Devices (name, memory, bandwidth, source); cpu measures this machine:"]
    lines += [
        f"  {each.name:24} {each.memory / 2**30:6.1f} GiB {each.bandwidth / 1e12:6.3f} TB/s  {each.source}"
        for each in DEVICES.values()
    ]
    lines += ["", "Scenarios, claims about schedulers (--scenario NAME):"]
    lines += [f"  {each.name:21} {each.claim}" for each in SCENARIOS.values()]
    lines += ["", "Routing rules:", f"  {', '.join(ROUTINGS)}"]
    lines += ["", "Presets, settings to start from:", f"  {', '.join(PRESETS)}"]
    lines += ["Presets, other schedulers of the field:", f"  {', '.join(SYSTEMS)}"]
    return "\n".join(lines)


def _describe_shape(shape: ModelShape) -> str:
    return f"{shape.name:36} {shape.num_params / 1e9:6.1f} B {shape.max_model_len:9,}  {shape.source}"
