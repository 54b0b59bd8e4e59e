"""The commands that simulate: `simulate`, `capacity`, `frontier`, `tune`; and `policies`, which lists what they try.
Their options are in `simulator_options.py`; each calls the file of its name.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pointsman.cli import options
from pointsman.cli import simulator_options as sim
from pointsman.cli.errors import EXIT_OK
from pointsman.cli.typer_app import plain_typer

app = plain_typer()


@app.command(cls=options.grouped(sim.SIMULATE_HELP))
@options.takes(sim.ARRIVING, sim.SIMULATED, sim.SERVED_BY, sim.SCHEDULER, sim.SPECULATION_AND_ADAPTERS, sim.TARGETS)
def simulate(
    preset: sim.SimulatedPreset = None,
    replicas: sim.Replicas = 1,
    scenario: sim.ScenarioName = None,
    seeds: sim.Seeds = 1,
    price_per_hour: sim.PricePerHour = None,
    as_json: sim.AsJsonObject = False,
    html: sim.HtmlFile = None,
    perfetto: sim.PerfettoFile = None,
    film: sim.FilmFile = None,
    list_names: sim.ListNames = False,
    **values: Any,
) -> int:
    """Simulate requests on a model and a device, and print latencies, throughput and load.

    The scheduler is the real one, under a virtual clock, so a simulation usually takes seconds. Without options a
    built-in example runs. Ctrl-C prints the report so far.
    """
    from pointsman.cli.simulate import run_simulation
    from pointsman.cli.simulation import names

    if list_names:
        print(names())
        return EXIT_OK
    if scenario is not None:
        from pointsman.cli.scenario import run_scenario

        others = {
            "preset": preset is not None,
            "replicas": replicas != 1,
            "perfetto": perfetto is not None,
            "film": film is not None,
        }
        others["price_per_hour"] = price_per_hour is not None
        return run_scenario(
            scenario,
            options.given(values),
            seeds=seeds,
            others=[name for name, is_given in others.items() if is_given],
            as_json=as_json,
            html=html,
        )
    return run_simulation(
        options.given(values),
        preset=preset,
        replicas=replicas,
        seeds=seeds,
        price_per_hour=price_per_hour,
        as_json=as_json,
        html=html,
        perfetto=perfetto,
        film=film,
    )


@app.command(cls=options.grouped(sim.CAPACITY_HELP))
@options.takes(sim.ARRIVING, sim.SERVED_BY, sim.SCHEDULER, sim.SPECULATION_AND_ADAPTERS, sim.TARGETS)
def capacity(
    replicas: sim.ReplicaRange = "1",
    share: sim.Share = 0.99,
    requests_per_second: sim.WantedRate = None,
    requests: sim.SampleRequests = None,
    samples: sim.MaxSamples = 32,
    confidence: sim.Confidence = "90%",
    within: sim.Within = None,
    workers: sim.Workers = None,
    price_per_hour: sim.PricesPerHour = None,
    preset: sim.SimulatedPreset = None,
    as_json: sim.AsJsonObject = False,
    list_names: sim.ListNames = False,
    **values: Any,
) -> int:
    """Find how many requests a second, or users, a service handles within its targets, or how many replicas it needs.

    Samples of the workload are simulated at several loads: generated with different seeds, or stretches of a trace. The
    result has an interval. With --think the requests come from users, each of which thinks before the next request, and
    the number of users is found. Without a target option, the target is a TTFT within 2 s.

    Exit code 0: found; 2: an option, a file or the model is wrong; 3: nothing meets the targets.
    """
    from pointsman.cli.capacity import run_capacity
    from pointsman.cli.simulation import names

    if list_names:
        print(names())
        return EXIT_OK
    return run_capacity(
        options.given(values),
        replicas=replicas,
        share=share,
        rate=requests_per_second,
        num_requests=requests,
        max_samples=samples,
        confidence=confidence,
        within=within,
        num_workers=workers,
        prices=price_per_hour,
        preset=preset,
        as_json=as_json,
    )


@app.command(cls=options.grouped(sim.FRONTIER_HELP))
@options.takes(sim.ARRIVING, sim.SERVED_BY, sim.SCHEDULER, sim.SPECULATION_AND_ADAPTERS, sim.TARGETS)
def frontier(
    variant: sim.Variants = None,
    replicas: sim.Replicas = 1,
    percentile: sim.ShownPercentile = "p99",
    rates: sim.GivenRates = None,
    samples: sim.NumSamples = 6,
    requests: sim.SampleRequests = None,
    confidence: sim.Confidence = "90%",
    price_per_hour: sim.PricesPerHour = None,
    workers: sim.Workers = None,
    preset: sim.SimulatedPreset = None,
    as_json: sim.AsJsonObject = False,
    svg: sim.SvgFile = None,
    html: sim.MovableHtmlFile = None,
    list_names: sim.ListNames = False,
    **values: Any,
) -> int:
    """Show TTFT and ITL over the request rate, for one or several settings, devices or policies.

    Each curve goes from light load to beyond saturation, with intervals over samples of the workload and over equally
    plausible step times. Several devices (--device h100,l40s) and each --variant have a curve of their own. Without a
    target option, the target is a TTFT within 2 s. Ctrl-C prints what is done.
    """
    from pointsman.cli.frontier import run_frontier
    from pointsman.cli.simulation import names

    if list_names:
        print(names())
        return EXIT_OK
    return run_frontier(
        options.given(values),
        variants=variant or (),
        replicas=replicas,
        preset=preset,
        percentile=percentile,
        rates=rates,
        num_samples=samples,
        num_requests=requests,
        confidence=confidence,
        prices=price_per_hour,
        num_workers=workers,
        as_json=as_json,
        svg=svg,
        html=html,
    )


@app.command(cls=options.grouped(sim.TUNE_HELP))
@options.takes(sim.TUNED, sim.SERVED_BY, sim.SCHEDULER, sim.SPECULATION_AND_ADAPTERS)
def tune(
    replicas: sim.TunedReplicas = "1",
    trials: sim.Trials = 48,
    requests: sim.PartRequests = 1000,
    workers: sim.Workers = None,
    ray: sim.RayAddress = None,
    preset: sim.SimulatedPreset = None,
    as_json: sim.AsJsonObject = False,
    list_names: sim.ListNames = False,
    **values: Any,
) -> int:
    """Find the scheduler's settings with the highest goodput: requests per second within the targets.

    Settings are chosen on one part of the workload, and compared with the defaults of vLLM on another part. Settings
    that are given are kept, all others are searched. Without a target option, the target is a TTFT within 2 s.

    Exit code 0: found, or no gain; 2: an option, a file or the model is wrong; 3: the targets are missed for more than
    1 % of the requests.
    """
    from pointsman.cli.simulation import names
    from pointsman.cli.tune import run_tune

    if list_names:
        print(names())
        return EXIT_OK
    return run_tune(
        options.given(values),
        replicas=replicas,
        num_trials=trials,
        num_requests=requests,
        workers=workers,
        ray=ray,
        preset=preset,
        as_json=as_json,
    )


@app.command()
def policies(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help="order, victim, reserve, limit or eviction [default: all].")
    ] = None,
    as_json: sim.AsJsonObject = False,
) -> int:
    """List the policies of the scheduler, with their parameters.

    Policies of installed packages are included.
    """
    from pointsman.cli.policies import run_policies

    return run_policies(kind, as_json=as_json)
