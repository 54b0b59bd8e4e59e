"""Arguments of the Ray application's `build_app`, its checks, and its autoscaling; without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
import pytest

from pointsman.cli.serve import serve_settings
from pointsman.integrations.ray.arguments import RayError, RaySettings, read_arguments
from pointsman.integrations.ray.autoscaling import METRIC, Load, num_replicas_needed, policy
from pointsman.integrations.ray.cluster import Node, check_capacity, check_model, cluster_address, replica_needs
from pointsman.integrations.ray.status import StatusWatch, is_scaled_down

NODES = [Node("a", "10.0.0.1", {"CPU": 4.0}), Node("b", "10.0.0.2", {"CPU": 2.0, "GPU": 1.0})]


def read(environment: dict[str, str] | None = None, /, **arguments: Any) -> RaySettings:
    return read_arguments(arguments, environment or {})


def test_ray_accepts_the_server_options_of_the_serve_command() -> None:
    """`serve run` passes options as text; a configuration file of Serve passes them with their types."""
    given = {
        "model": "demo",
        "num_blocks": 512,
        "order": "priority",
        "displace": False,
        "watermark": 0.05,
        "kv_offload_bytes": "64MiB",
        "served_model_name": ["a", "b"],
        "max_request_bytes": "1MiB",
        "data_parallel_size": 2,
        "log_stats_interval": 0.0,
        "seed": 3,
    }
    text = {**{name: str(value) for name, value in given.items()}, "served_model_name": '["a", "b"]'}
    hyphens = {name.replace("_", "-"): value for name, value in text.items()}
    expected = serve_settings(given, None, {})
    assert read(**given).serve == read(**text).serve == read(**hyphens).serve == expected
    assert read(served_model_name="a").serve.server.served_model_name == ("a",)
    assert read({"POINTSMAN_API_KEY": "secret"}).serve.server.api_keys == ("secret",)


def test_ray_reads_the_configuration_file_of_the_server(tmp_path: Any) -> None:
    (tmp_path / "serve.yaml").write_text("num-blocks: 64\n")
    assert read(config=str(tmp_path / "serve.yaml"), max_n=3).serve.engine["num_blocks"] == 64


def test_each_replica_gets_one_core_per_engine_by_default() -> None:
    assert read().engine_options["ray_actor_options"] == {"num_cpus": 1}
    two = read(data_parallel_size="2", num_replicas="3")
    assert two.engine_options["ray_actor_options"] == {"num_cpus": 2} and two.num_engines == 6
    given = read(ray_actor_options='{"num_cpus": 4, "num_gpus": 1}', max_replicas_per_node="1")
    assert given.engine_options["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 1}
    assert given.engine_options["max_replicas_per_node"] == 1
    assert read().api_actor_options == {"num_cpus": 0}
    scaled = read(autoscaling_config='{"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 12}')
    assert scaled.autoscaling == {"min_replicas": 2, "max_replicas": 5} and scaled.target_ongoing_requests == 12
    assert scaled.num_engines == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_block": "3"}, ["num_block", "did you mean num_blocks?"]),
        ({"zzz": "3"}, ["zzz", "pointsman serve --help"]),
        ({"num_blocks": "many"}, ["num_blocks", "'many'", "a whole number"]),
        ({"num_blocks": True}, ["num_blocks", "True"]),
        ({"enable_prefix_caching": "perhaps"}, ["enable_prefix_caching", "true or false"]),
        ({"watermark": "2"}, ["watermark", "2"]),
        ({"num-blocks": "3", "num_blocks": "3"}, ["num_blocks", "twice"]),
        ({"host": "0.0.0.0"}, ["host", "Serve's proxies listen", "http_options"]),
        ({"num_replicas": "0"}, ["num_replicas is 0", "at least 1"]),
        ({"num_replicas": "auto"}, ["num_replicas", "'auto'", "a whole number"]),
        ({"num_replicas": "2", "autoscaling_config": "{}"}, ["num_replicas", "autoscaling_config", "one of them"]),
        ({"autoscaling_config": "[]"}, ["autoscaling_config", "JSON"]),
        ({"autoscaling_config": {"min_replicas": 0}}, ["min_replicas is 0", "at least 1"]),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, ["max_replicas is 2", "min_replicas is 3"]),
        ({"autoscaling_config": {"policy": {}}}, ["policy", "leave policy out"]),
        ({"autoscaling_config": {"target_ongoing_requests": 0}}, ["target_ongoing_requests is 0", "above 0"]),
        ({"data_parallel_size": "0"}, ["data_parallel_size is 0", "at least 1"]),
        ({"data_parallel_size": "4", "ray_actor_options": '{"num_cpus": 2}'}, ["4", "num_cpus", "2", "raise"]),
        ({"ray_actor_options": '{"num_cpus": "two"}'}, ["num_cpus is 'two'"]),
        ({"ray_actor_options": "num_cpus=2"}, ["ray_actor_options", "JSON"]),
        ({"max_engine_restarts": "-1"}, ["max-engine-restarts is -1"]),
        ({"preset": "fast"}, ["fast", "low-latency"]),
    ],
)
def test_wrong_ray_argument_gives_a_one_line_error_with_the_remedy(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RayError) as found:
        read_arguments(arguments, {})
    message = str(found.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_ray_cluster_without_capacity_for_the_replicas_is_refused() -> None:
    def check(**arguments: Any) -> None:
        settings = read(**arguments)
        check_capacity(NODES, replica_needs(settings.engine_options), settings)

    check(num_replicas=6)
    check(num_replicas=3, data_parallel_size=2)
    check(ray_actor_options={"num_cpus": 0, "num_gpus": 1})
    check(num_replicas=100, ray_actor_options={"num_cpus": 0})
    check(autoscaling_config={"min_replicas": 6, "max_replicas": 60})
    check(placement_group_bundles=[{"CPU": 3}, {"CPU": 3}])
    with pytest.raises(RayError, match=r"num_replicas is 7, .* for 6: .*CPU 1.*10.0.0.1: CPU 4; 10.0.0.2: CPU 2"):
        check(num_replicas=7)
    with pytest.raises(RayError, match=r"capacity for 2: .*CPU 1, at most 1 on a node"):
        check(num_replicas=3, max_replicas_per_node=1)
    with pytest.raises(RayError, match=r"capacity for 0: .*CPU 5"):
        check(ray_actor_options={"num_cpus": 5})
    with pytest.raises(RayError, match=r"capacity for 1: .*GPU 1.*check_resources=false"):
        check(num_replicas=2, ray_actor_options={"num_gpus": 1})
    with pytest.raises(RayError, match="min_replicas is 7"):
        check(autoscaling_config={"min_replicas": 7})
    with pytest.raises(RayError, match="capacity for 1"):
        check(num_replicas=2, placement_group_bundles=[{"CPU": 3}, {"CPU": 3}])
    needs = replica_needs({"ray_actor_options": {"num_cpus": 1, "memory": 10, "resources": {"a": 1}}})
    assert needs == {"CPU": 1, "memory": 10, "a": 1}


def test_error_lists_the_ray_nodes_that_lack_the_model(tmp_path: Any) -> None:
    check_model(str(tmp_path), [Node("", "this machine", {"CPU": 1.0})])
    with pytest.raises(RayError, match=r"nowhere.*no such directory on this machine; copy it there"):
        check_model(str(tmp_path / "nowhere"), [Node("", "this machine", {"CPU": 1.0})])


def test_waiting_requests_raise_the_number_of_replicas() -> None:
    def wanted(*loads: tuple[int, int], unsent: int = 0, engines: int = 1, target: float | None = None) -> int:
        return num_replicas_needed([Load(*load) for load in loads], unsent, engines, 64, target)

    assert wanted((0, 0)) == wanted((64, 0)) == wanted() == 1
    assert wanted((64, 1)) == 2 and wanted((64, 64)) == 2 and wanted((64, 65)) == 3
    assert wanted((8, 4)) == 2 and wanted((8, 17)) == 4  # these requests wait for blocks, not for slots
    assert wanted((40, 0), (40, 0)) == 2 and wanted((30, 0), (30, 0)) == 1
    assert wanted((64, 0), (64, 0), engines=2) == 1 and wanted((64, 1), (64, 0), engines=2) == 2
    assert wanted((10, 0), target=4) == 3 and wanted((3, 0), (1, 0), target=4) == 1
    assert wanted(unsent=65) == 2


def test_autoscaling_policy_rounds_the_mean_of_reported_replicas() -> None:
    def decided(*reported: float) -> int:
        values = {f"replica {number}": value for number, value in enumerate(reported)}
        context = SimpleNamespace(aggregated_metrics={METRIC: values} if reported else {}, target_num_replicas=7)
        return policy(context)[0]

    assert decided() == 7
    assert decided(1.0, 1.1) == 1  # a request waited for a step or two
    assert decided(2.6, 2.4) == 3


def test_ray_cluster_address_equals_that_of_serve_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cluster_address()[0] is None
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("10.0.0.1:6379\n")
    assert cluster_address() == ("10.0.0.1:6379", str(file))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert cluster_address() == ("10.0.0.1:6379", str(file))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert cluster_address() == ("10.0.0.2:6379", "RAY_ADDRESS")
    with click.Context(click.Command("run")) as context:
        context.params["address"] = "10.0.0.3:6379"
        assert cluster_address() == ("10.0.0.3:6379", "--address")


def status(app: str, api: dict[str, int], engines: dict[str, int]) -> dict[str, Any]:
    states = {"api": SimpleNamespace(replica_states=api), "engines": SimpleNamespace(replica_states=engines)}
    return {"llm": SimpleNamespace(status=app, deployments=states), "other": SimpleNamespace(status="DELETING")}


def test_status_watch_reports_the_end_and_the_number_of_engines() -> None:
    running = {"RUNNING": 1}
    replacing = {"RUNNING": 1, "STOPPING": 1}
    watch = StatusWatch("llm", "api", "engines")
    watch.read_status(status("DEPLOYING", replacing, {"RUNNING": 2, "STARTING": 1, "STOPPING": 3}))
    assert not watch.is_ending and watch.num_replicas == 3  # the API that this one replaces is stopping
    watch.read_status(status("RUNNING", running, {"RUNNING": 4}))
    watch.read_status({})  # the controller has just started
    assert not watch.is_ending and watch.num_replicas == 4
    watch.read_status(status("DEPLOYING", {"STARTING": 1, "STOPPING": 1}, running))
    assert watch.is_ending
    watch = StatusWatch("llm", "api", "engines")
    watch.read_status(status("DELETING", running, running))
    assert watch.is_ending


def test_engines_end_early_only_when_autoscaling_stops_them() -> None:
    some, running = {"RUNNING": 1, "STOPPING": 1}, {"RUNNING": 1}
    names = "llm", "api", "engines"
    assert is_scaled_down(status("RUNNING", running, some), *names)
    assert not is_scaled_down(status("RUNNING", running, running), *names)
    assert not is_scaled_down(status("DELETING", running, some), *names)
    assert not is_scaled_down(status("DEPLOYING", {"STARTING": 1, "STOPPING": 1}, some), *names)
    assert not is_scaled_down({}, *names)
