"""Searches of settings: they find a known optimum, judge it on other requests, and do not depend on the workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from pointsman.core import Scheduler, SchedulerConfig
from pointsman.core.policy.registry import known
from pointsman.sim.devices import DEVICES, Device
from pointsman.sim.errors import ModelTooLarge, SimulationError
from pointsman.sim.report.summary import Targets, figures
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.stretches import Parts, Stretches, split
from pointsman.sim.trial import Job, Judge, Part, combine_samples
from pointsman.sim.tunables import HAVE_KNOBS, REPLICAS, Space, tunables
from pointsman.sim.tune import Judged, Search, Tuning, tune
from pointsman.sim.vllm_defaults import vllm_defaults
from pointsman.sim.workers import workers
from pointsman.sim.workload import Constant, Generated, Lengths, OpenLoop, PoissonArrivals, WorkloadError

BASE = SchedulerConfig.preset(
    "vllm", num_blocks=4000, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=4096
)
STEP_TIME = LinearStepTime(per_step=5e-3, per_token=5e-5)
"""A step of 512 tokens takes 31 ms, one of 768 tokens 43 ms, and one of the default budget 0.2 s."""
TARGETS = Targets(ttft=2.0, itl=0.04, itl_of="gap")


def parts(rate: float = 10, count: int = 30, prompt: int = 800, output: int = 20, seed: int = 3) -> Parts:
    lengths = Lengths(Constant(prompt), Constant(output))
    return split(list(OpenLoop(Generated(PoissonArrivals(rate), lengths, 2 * count, seed)).first_arrivals()), count)


def searched(
    requests: Parts,
    *,
    base: SchedulerConfig = BASE,
    targets: Targets = TARGETS,
    num_workers: int = 1,
    num_trials: int = 15,
    replicas: tuple[int, int] = (1, 1),
    fixed: frozenset[str] = frozenset(),
    sized: Callable[[SchedulerConfig], SchedulerConfig] = lambda config: config,
    progress: Callable[[int, int, float], None] | None = None,
    others: tuple[LinearStepTime, ...] = (),
) -> Tuning:
    source = Stretches((*requests.train, *requests.held_out))
    judge = Judge(source=source, step_times=(STEP_TIME, *others), targets=targets)
    search = Search(
        space=Space(base, replicas=replicas, fixed=fixed),
        parts=requests,
        targets=targets,
        sized=sized,
        num_models=1 + len(others),
        num_trials=num_trials,
        progress=progress,
    )
    with workers(judge, num_workers) as runner:
        return tune(search, runner)


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    return searched(parts())


# ---------------------------------------------------------------------- what is found


def test_tuning_finds_the_token_budget_that_meets_the_itl_target(tuning: Tuning) -> None:
    assert tuning.is_complete and tuning.is_gain
    assert tuning.chosen is not None and tuning.judged is not None and tuning.judged_defaults is not None
    assert tuning.chosen.config.max_num_batched_tokens in (256, 384, 512)
    assert tuning.judged.held_out.longest_gap_p99 is not None
    assert tuning.judged.held_out.longest_gap_p99 <= 0.04
    assert tuning.judged.held_out.share > 0.95 > 0.5 > tuning.judged_defaults.held_out.share
    assert tuning.recommended is tuning.judged
    assert tuning.judged_defaults.trial is tuning.trials[0]
    assert tuning.trials[0].config == BASE


def test_the_choice_is_judged_with_other_step_times_too(tuning: Tuning) -> None:
    """With equal step times the goodput is equal; steps that take longer than any target leave nothing."""
    found = searched(parts(), others=(STEP_TIME, LinearStepTime(per_step=9.0)))
    assert found.judged is not None and found.judged_defaults is not None and tuning.judged is not None
    assert found.judged.goodput == tuning.judged.goodput
    assert found.judged.alternatives == (found.judged.goodput, 0.0)
    assert found.judged_defaults.alternatives == (found.judged_defaults.goodput, 0.0)
    assert found.other_gains == [found.gain, 0.0]
    assert tuning.judged.alternatives == () and tuning.other_gains == []


def test_settings_that_change_nothing_keep_their_defaults(tuning: Tuning) -> None:
    assert tuning.chosen is not None
    defaults = tuning.trials[0].settings
    changed = {name for name, value in tuning.chosen.settings.items() if value != defaults[name]}
    assert changed == {"max_num_batched_tokens"}
    assert tuning.not_searched == ["watermark", "decode_reserve", "full_sequence_must_fit", "reserves", "victim"]
    assert all(trial.settings[name] == defaults[name] for trial in tuning.trials for name in tuning.not_searched)


def test_judged_figures_equal_a_simulation_of_the_held_out_part(tuning: Tuning) -> None:
    assert tuning.judged is not None
    (stretch,) = parts().held_out
    outcome = simulate(stretch, tuning.judged.trial.config, STEP_TIME)
    report = figures(
        outcome, tuning.judged.trial.config, ttft_target=2.0, itl_target=0.04, itl_of="gap", num_bootstrap=0
    )
    found = tuning.judged.held_out
    assert report.goodput is not None and found.share == report.goodput.share.value
    assert found.goodput == pytest.approx(found.share * stretch.num_requests / stretch.seconds)
    assert (found.ttft_p99, found.itl_p99) == (report.ttft.p99.value, report.itl.p99.value)


def test_neighbours_differ_in_one_setting_by_one_value(tuning: Tuning) -> None:
    assert tuning.chosen is not None
    best = tuning.chosen.settings
    assert {"max_num_batched_tokens", "max_num_seqs"} <= {name for name, _ in tuning.neighbours}
    for name, trial in tuning.neighbours:
        changed = {other for other, value in trial.settings.items() if value != best[other]}
        assert changed == {name}, "no other setting is at the border here"
        assert trial in tuning.trials


def test_no_trial_beats_a_trial_of_the_frontier(tuning: Tuning) -> None:
    def merits(goodput: float, *times: float | None) -> tuple[float, ...]:
        return (goodput, *(-math.inf if time is None else -time for time in times))

    known = [
        merits(trial.goodput, trial.train.ttft_p99, trial.train.itl_p99)
        for trial in tuning.trials
        if not trial.is_hopeless
    ]
    frontier = [merits(trial.goodput, trial.train.ttft_p99, trial.train.itl_p99) for trial in tuning.frontier()]
    assert frontier == sorted(frontier, reverse=True)
    assert max(known)[0] == frontier[0][0]
    for mine in known:
        is_beaten = any(other != mine and all(a >= b for a, b in zip(other, mine, strict=True)) for other in known)
        assert is_beaten == (mine not in frontier)


def test_defaults_are_kept_if_nothing_is_better() -> None:
    tuning = searched(parts(rate=2, count=30, output=5), targets=Targets(ttft=30.0), num_trials=13)
    assert tuning.gain == 0 and not tuning.is_gain
    assert tuning.chosen is tuning.defaults
    assert tuning.recommended is tuning.judged_defaults


def test_settings_worse_on_held_out_requests_are_not_recommended(tuning: Tuning) -> None:
    assert tuning.judged is not None and tuning.judged_defaults is not None
    worse = Judged(tuning.judged.trial, replace(tuning.judged_defaults.held_out, goodput=0.1))
    for other in (worse, Judged(tuning.judged.trial, tuning.judged_defaults.held_out)):
        unlucky = Tuning(judged=other, judged_defaults=tuning.judged_defaults)
        assert not unlucky.is_gain
        assert unlucky.recommended is tuning.judged_defaults
    useless = Judged(tuning.judged_defaults.trial, replace(tuning.judged_defaults.held_out, goodput=0.0))
    assert Tuning(judged=tuning.judged, judged_defaults=useless).gain == math.inf
    assert Tuning(judged=useless, judged_defaults=useless).gain is None


def test_tuning_reports_that_no_settings_meet_impossible_targets() -> None:
    tuning = searched(parts(count=20), targets=Targets(ttft=1e-4), num_trials=10)
    assert tuning.meets_nothing and tuning.is_complete and not tuning.is_gain
    assert tuning.gain is None


def test_tuning_chooses_replicas_by_goodput_per_replica() -> None:
    """One replica is overloaded, and three are more than enough."""
    requests = parts(rate=40, count=60, output=3)
    tuning = searched(requests, targets=Targets(ttft=0.4), replicas=(1, 3), num_trials=8)
    assert tuning.judged is not None and tuning.judged_defaults is not None
    assert tuning.judged.trial.num_replicas == 2 == tuning.judged.trial.settings[REPLICAS]
    assert tuning.judged.goodput == pytest.approx(tuning.judged.held_out.goodput / 2)
    assert [trial.num_replicas for trial in tuning.trials[:3]] == [1, 2, 3]
    assert tuning.judged_defaults.goodput > 0


def test_settings_for_a_short_pool_are_searched_with_few_blocks() -> None:
    small = BASE.replace(num_blocks=160, max_model_len=2048)
    tuning = searched(parts(count=20, prompt=300, output=100), base=small, targets=Targets(ttft=4.0), num_trials=16)
    assert not tuning.not_searched
    assert len({trial.settings["watermark"] for trial in tuning.trials}) > 1


def test_settings_that_are_fixed_or_do_not_fit_are_not_tried() -> None:
    def sized(config: SchedulerConfig) -> SchedulerConfig:
        if config.max_num_batched_tokens > 4096:
            raise ModelTooLarge("its activations do not fit")
        return config.replace(num_blocks=3000)

    tuning = searched(parts(count=20), sized=sized, fixed=frozenset({"max_num_seqs", "order"}), num_trials=16)
    assert {trial.config.max_num_seqs for trial in tuning.trials} == {256}
    assert {trial.config.num_blocks for trial in tuning.trials} == {3000}
    assert max(trial.config.max_num_batched_tokens for trial in tuning.trials) == 4096
    with pytest.raises(ModelTooLarge):
        searched(parts(count=20), base=BASE.replace(max_num_batched_tokens=8192), sized=sized)


# ---------------------------------------------------------------------- where simulations run


def test_any_number_of_workers_finds_the_same_settings(tuning: Tuning) -> None:
    assert searched(parts(), num_workers=2) == tuning


def test_an_interrupted_search_keeps_its_results() -> None:
    def interrupt(num_tried: int, expected: int, best: float) -> None:
        assert num_tried <= expected
        if num_tried >= 12:
            raise KeyboardInterrupt

    tuning = searched(parts(count=20), progress=interrupt)
    assert not tuning.is_complete
    assert tuning.chosen in tuning.trials and tuning.judged is None and tuning.recommended is None


def test_search_arguments_out_of_range_are_refused() -> None:
    judge = Judge(source=Stretches(parts().train), step_times=(STEP_TIME,), targets=TARGETS)
    with pytest.raises(SimulationError, match="number of workers is 0"):
        workers(judge, 0)
    with pytest.raises(SimulationError, match="number of trials is 0"):
        searched(parts(count=20), num_trials=0)
    with pytest.raises(SimulationError, match="no latency target"):
        searched(parts(count=20), targets=Targets())


# ---------------------------------------------------------------------- settings and stretches

VARIED = frozenset({"priority", "tenant", "ttft_target", "retention"})


def test_a_scheduler_accepts_every_value_of_every_setting() -> None:
    space = Space(BASE, varied=VARIED)
    for tunable in tunables(VARIED):
        for value in tunable.values:
            point = space.make_point({tunable.name: value})
            assert getattr(space.config(point), tunable.name) == space.settings(point)[tunable.name]
            Scheduler(space.config(point))


def test_registered_policies_are_among_the_values_to_try() -> None:
    values = {tunable.name: tunable.values for tunable in Space(BASE, varied=VARIED).tunables}
    assert {spec.partition(":")[0] for spec in values["order"]} == set(known("order"))
    assert set(known("victim")) <= set(values["victim"])
    assert {spec.partition(":")[0] for spec in values["eviction"]} == set(known("eviction"))
    reserves = {spec.partition(":")[0] for specs in values["reserves"] for spec in specs}
    assert reserves == set(known("reserve")) - HAVE_KNOBS
    assert ("bypass:bound=4",) in values["reserves"], "a value that the policy declares to try"
    (order,) = (each for each in Space(BASE).tunables if each.name == "order")
    assert {"fcfs", "fcfs-front"} <= set(order.values)
    assert not {"priority", "fair"} & set(order.values), "they change nothing if all requests are alike"
    (eviction,) = (each for each in Space(BASE).tunables if each.name == "eviction")
    assert eviction.values == ("lru", "reuse", "reuse:share=0.5")
    without = Space(BASE.replace(enable_prefix_caching=False))
    assert "eviction" not in without.settings(without.base)


def test_contradictory_settings_become_the_nearest_consistent_ones() -> None:
    space = Space(BASE)
    point = space.make_point({"max_num_batched_tokens": 384, "max_num_seqs": 1024, "long_prefill_token_threshold": 512})
    settings = space.settings(point)
    assert (settings["max_num_seqs"], settings["long_prefill_token_threshold"]) == (384, 0)
    assert space.changed_settings(point) == ["max_num_batched_tokens", "max_num_seqs"]
    assert space.changed_settings(space.make_point({"max_num_batched_tokens": 256})) == ["max_num_batched_tokens"]


def test_a_base_value_between_listed_values_has_both_neighbours() -> None:
    space = Space(BASE.replace(max_num_seqs=100))
    beside = [space.settings(point)["max_num_seqs"] for _, point in space.neighbours(space.base, ["max_num_seqs"])]
    assert beside == [96, 128]


def test_training_and_held_out_stretches_alternate_without_overlap() -> None:
    arrivals = list(OpenLoop(Generated(PoissonArrivals(10), Lengths(Constant(5), Constant(5)), 5000)).first_arrivals())
    found = split(arrivals, 1600)
    assert [stretch.num_requests for stretch in (*found.train, *found.held_out)] == [533] * 6
    starts = {
        part: sorted(stretch.arrivals[0][1].index for stretch in getattr(found, part)) for part in ("train", "held_out")
    }
    assert starts == {"train": [0, 1666, 3333], "held_out": [833, 2500, 4166]}
    assert sorted(stretch.load for stretch in found.train)[1] == found.train[0].load
    assert found.train[0].num_requests / found.train[0].seconds == pytest.approx(10, rel=0.15)


def test_split_refuses_too_few_or_simultaneous_requests() -> None:
    arrivals = list(OpenLoop(Generated(PoissonArrivals(10), Lengths(Constant(5), Constant(5)), 40)).first_arrivals())
    with pytest.raises(WorkloadError, match="19 requests; at least 20"):
        split(arrivals[:19], 100)
    with pytest.raises(WorkloadError, match="num_requests of each part is 5; it must be at least 10"):
        split(arrivals, 5)
    with pytest.raises(WorkloadError, match="at one time"):
        split([(7.0, request) for _, request in arrivals], 100)


def test_requests_without_tokens_score_lower_than_late_ones() -> None:
    requests = parts(count=20)
    judge = Judge(source=Stretches(requests.train), step_times=(STEP_TIME,), targets=Targets(ttft=0.001))
    late = combine_samples([judge.measure(Job(BASE, 1, Part(0)))])
    refused = combine_samples([judge.measure(Job(BASE.replace(max_model_len=100), 1, Part(0)))])
    assert late.share == refused.share == 0
    assert late.closeness > refused.closeness == 0
    assert (refused.num_refused, refused.ttft_p99, refused.itl_p99) == (20, None, None)


# ---------------------------------------------------------------------- vLLM's defaults


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("H100-SXM", (8192, 1024)),
        ("H200-SXM", (8192, 1024)),
        ("RTX-PRO-6000-Blackwell", (8192, 1024)),
        ("A100-80GB-SXM", (2048, 256)),
        ("L40S", (2048, 256)),
        ("B200", (16384, 1024)),
        ("MI300X", (16384, 1024)),
    ],
)
def test_vllms_defaults_depend_on_the_device(device: str, expected: tuple[int, int]) -> None:
    assert vllm_defaults(DEVICES[device], 131_072) == expected


def test_vllms_defaults_are_known_for_a_cpu_and_for_short_models() -> None:
    cpu = Device(
        name="cpu",
        memory=2**38,
        bandwidth=1e11,
        peak_flops={"fp32": 1e12},
        link_bandwidth=0,
        host_bandwidth=1e10,
        source="",
    )
    assert vllm_defaults(cpu, 4096) == (2048, 128)
    assert vllm_defaults(cpu, 4096, tensor_parallel=2) == (4096, 256)
    assert vllm_defaults(DEVICES["H100-SXM"], 2) == (2048, 1024)
