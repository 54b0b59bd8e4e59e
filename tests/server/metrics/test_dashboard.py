"""The dashboard's file; its expressions and the documented alerts in a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from _server_process import ServerProcess

from pointsman.server.metrics import table as metric_table
from pointsman.server.metrics.readings import SCRAPED
from pointsman.server.metrics.table import Definition

ROOT = Path(__file__).resolve().parents[3]
BOARD: dict[str, Any] = json.loads((ROOT / "dashboards" / "pointsman.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}

DEFINITIONS = (
    *(definition for definition, _ in SCRAPED),
    *(value for value in vars(metric_table).values() if isinstance(value, Definition)),
)
PROCESS_METRICS = {"resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds"}
METRIC_NAME = re.compile(r"\b(?:vllm:|pointsman:|process_)\w+")

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)

SECONDS_OF_LOAD = 8
RATE_INTERVAL = "10s"
NO_DATA_WITHOUT_PREEMPTION = "pointsman:resumed_prefix_cache_hits_total"


# ---------------------------------------------------------------------------------------- the file


def test_dashboard_matches_grafanas_schema() -> None:
    assert BOARD["schemaVersion"] >= 38
    assert BOARD["title"] == "Pointsman"
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert {"datasource", "model_name"} <= set(VARIABLES)
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"] and panel["description"], panel["id"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), panel["title"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]


def test_dashboard_panels_do_not_overlap_or_leave_the_grid() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_dashboard_expressions_use_existing_metrics_and_the_variables() -> None:
    exposed = {f"{prefix}process_{name}" for prefix in ("", "pointsman:engine_") for name in PROCESS_METRICS}
    for definition in DEFINITIONS:
        suffixes = ("_bucket", "_sum", "_count") if definition.kind == "histogram" else ("",)
        exposed |= {definition.name + suffix for suffix in suffixes}
    assert len(EXPRESSIONS) > 60
    for title, expression in EXPRESSIONS:
        names = METRIC_NAME.findall(expression)
        assert names, title
        assert set(names) <= exposed, title
        selectors = re.findall(r"\{(.*?)\}", expression)
        assert len(selectors) == len(names), title
        for name, selector in zip(names, selectors, strict=True):
            assert 'instance=~"$instance"' in selector, title
            assert ('model_name=~"$model_name"' in selector) == (not name.split(":engine_")[-1].startswith("process_"))


# ---------------------------------------------------------------------------------------- a real Prometheus


class Prometheus:
    """A running Prometheus, through its HTTP interface."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=10)

    def get(self, path: str, **params: str | float) -> Any:
        """The data of Prometheus's response; an error response fails the test with its message."""
        answer = self.client.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", f"{params}: {answer.get('error')}"
        return answer["data"]

    def wait_for(self, expression: str, seconds: float) -> None:
        """Wait until an expression has a value."""
        end = time.monotonic() + seconds
        while not self.get("query", query=expression)["result"]:
            assert time.monotonic() < end, f"no data for {expression} within {seconds} s"
            time.sleep(0.1)


def documented_alerts() -> str:
    """The rules that the documentation recommends."""
    blocks: list[str] = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "guides" / "monitor_a_server.md").read_text(), re.DOTALL
    )
    return next(block for block in blocks if "groups:" in block)


ALERT_CASES = """
rule_files: [alerts.yaml]
evaluation_interval: 15s
tests:
  - name: two engines of four that a cluster may start; one was started again; the last figures of another are old
    interval: 15s
    input_series:
      - {series: 'up{job="pointsman"}', values: '1x80'}
      - {series: 'pointsman:engine_up{engine="0"}', values: '0x80'}
      - {series: 'pointsman:engine_up{engine="1"}', values: '1x80'}
      - {series: 'pointsman:stats_age_seconds{engine="0"}', values: '0+15x80'}
      - {series: 'pointsman:stats_age_seconds{engine="1"}', values: '0x80'}
      - {series: 'pointsman:engine_restarts_total{engine="1"}', values: '0x20 1x60'}
      - {series: 'pointsman:engine_hangs_total{engine="1"}', values: '0x20 1x60'}
    alert_rule_test:
      - {eval_time: 4m, alertname: EngineDown, exp_alerts: []}
      - {eval_time: 4m, alertname: EngineStuck, exp_alerts: []}
      - {eval_time: 4m, alertname: EngineMissing, exp_alerts: []}
      - {eval_time: 4m, alertname: EngineRestarted, exp_alerts: []}
      - {eval_time: 4m, alertname: EngineHung, exp_alerts: []}
      - {eval_time: 12m, alertname: EngineMissing, exp_alerts: [{}]}
      - {eval_time: 12m, alertname: EngineRestarted, exp_alerts: [{exp_labels: {engine: "1"}}]}
      - {eval_time: 12m, alertname: EngineHung, exp_alerts: [{exp_labels: {engine: "1"}}]}
  - name: no engine, one that hangs, and no server
    interval: 15s
    input_series:
      - {series: 'up{job="pointsman", instance="gone"}', values: '0x80'}
      - {series: 'pointsman:engine_up{engine="0", instance="dead"}', values: '0x80'}
      - {series: 'pointsman:engine_up{engine="1", instance="dead"}', values: '0x80'}
      - {series: 'pointsman:engine_up{instance="stuck"}', values: '1x80'}
      - {series: 'pointsman:stats_age_seconds{instance="stuck"}', values: '0+15x80'}
    alert_rule_test:
      - eval_time: 4m
        alertname: EngineDown
        exp_alerts:
          - {exp_labels: {instance: dead}}
          - {exp_labels: {instance: gone, job: pointsman}}
      - {eval_time: 4m, alertname: EngineStuck, exp_alerts: [{exp_labels: {instance: stuck}}]}
"""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_engine_alerts_fire_in_the_documented_cases_only(tmp_path: Path) -> None:
    """In an autoscaled fleet, a missing engine is no reason for an alert."""
    (tmp_path / "alerts.yaml").write_text(documented_alerts())
    (tmp_path / "cases.yaml").write_text(ALERT_CASES)
    command = [str(PROMTOOL), "test", "rules", "cases.yaml"]
    check = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, check.stdout + check.stderr


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` (host:port) and evaluates the documented alerts, every second."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
        f"scrape_configs: [{{job_name: pointsman, static_configs: [{{targets: ['{target}']}}]}}]\n"
        "rule_files: [alerts.yaml]\n"
    )
    (folder / "alerts.yaml").write_text(documented_alerts())
    log = folder / "prometheus.log"
    command = [str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=file, stderr=file)
    try:
        yield Prometheus(f"http://{_address(process, log)}")
    finally:
        process.terminate()
        process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that Prometheus listens on, from its log, once it is ready."""
    for _ in range(300):
        found = re.search(r"address=(127\.0\.0\.1:[1-9]\d*)", log.read_text())
        if found and "Server is ready" in log.read_text():
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"prometheus does not start: {log.read_text()}")


@contextmanager
def load(url: str) -> Iterator[list[Exception]]:
    """Streams of completions until the block ends, some of one prefix, and a request that is refused now and then."""
    stop = threading.Event()
    failures: list[Exception] = []

    def ask(worker: int) -> None:
        try:
            with httpx.Client(base_url=url, timeout=30) as client:
                number = 0
                while not stop.is_set():
                    number += 1
                    prompt = f"{'The import statement is used in modules. ' * 12}{worker} {number}"
                    body = {"prompt": prompt, "max_tokens": 32, "stream": True, "ignore_eos": True}
                    with client.stream("POST", "/v1/completions", json=body) as answer:
                        assert answer.status_code == 200, answer.read()
                        assert sum(1 for _ in answer.iter_lines()) > 1
                    if number % 4 == 0:
                        assert client.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def substituted(expression: str) -> str:
    """The expression that Grafana sends if all values of every variable are selected."""
    for name, value in {"model_name": ".+", "instance": ".+", "__rate_interval": RATE_INTERVAL}.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression
    return expression


def finite_values(result: list[dict[str, Any]]) -> list[float]:
    return [float(text) for series in result for _, text in series["values"] if math.isfinite(float(text))]


@pytest.mark.e2e
@needs_prometheus
def test_prometheus_evaluates_every_dashboard_expression(server: ServerProcess, tmp_path: Path) -> None:
    target = f"127.0.0.1:{server.port}"
    with prometheus(tmp_path, target) as scraper:
        started = time.time()
        with load(server.url) as failures:
            scraper.wait_for("pointsman:engine_up == 1", 60)
            time.sleep(SECONDS_OF_LOAD)
            window: dict[str, float] = {"start": started, "end": time.time(), "step": 1}
        assert failures == []

        without_data = []
        for title, expression in EXPRESSIONS:
            found = scraper.get("query_range", query=substituted(expression), **window)["result"]
            if not finite_values(found) and NO_DATA_WITHOUT_PREEMPTION not in expression:
                without_data.append((title, expression))
        assert without_data == []

        rules = [rule for group in scraper.get("rules")["groups"] for rule in group["rules"]]
        assert len(rules) == documented_alerts().count("- alert:") >= 5
        assert [rule for rule in rules if rule["health"] != "ok"] == []
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []

        for variable in ("model_name", "instance"):
            query = re.fullmatch(r"label_values\((.+), (\w+)\)", VARIABLES[variable]["query"]["query"])
            assert query is not None
            values = scraper.get(f"label/{query[2]}/values", **{"match[]": substituted(query[1])})
            assert len(values) == 1
            assert variable != "instance" or values == [target]

        # The load is visible in the values, also at the low rates of a busy machine.
        for expression in (
            'rate(vllm:request_success_total{finished_reason="length"}[10s]) > 0',
            "rate(vllm:time_to_first_token_seconds_count[10s]) > 0",
            "rate(vllm:inter_token_latency_seconds_count[10s]) > 0",
            "rate(vllm:prefix_cache_hits_total[10s]) > 0",
            'rate(pointsman:requests_refused_total{reason="invalid"}[10s]) > 0',
            "pointsman:http_open_streams > 0",
        ):
            assert finite_values(scraper.get("query_range", query=expression, **window)["result"]), expression


@pytest.mark.e2e
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_promtool_complains_only_about_vllm_names(server: ServerProcess) -> None:
    exposition = httpx.get(f"{server.url}/metrics").content
    check = subprocess.run([str(PROMTOOL), "check", "metrics"], input=exposition, capture_output=True, timeout=60)
    assert check.returncode in (0, 3), check.stderr.decode()  # 3: remarks on style
    remarks = [line for line in check.stderr.decode().splitlines() if "should not contain ':'" not in line]
    assert all(line.startswith("vllm:iteration_tokens_total ") for line in remarks), remarks
