"""Devices: names, figures, and this CPU measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pointsman.sim.devices import DEVICES, described_device, device, measure_cpu
from pointsman.sim.errors import SimulationError, UnknownName


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "H100-SXM"),
        ("H100-SXM", "H100-SXM"),
        ("NVIDIA H100", "H100-SXM"),
        ("rtx4090", "RTX-4090"),
        ("GeForce RTX 4090", "RTX-4090"),
        ("rtx_pro_6000", "RTX-PRO-6000-Blackwell"),
        ("a100", "A100-80GB-SXM"),
        ("a100-40gb", "A100-40GB-SXM"),
        ("mi300x", "MI300X"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("a10g", "A10G"),
    ],
)
def test_device_names_are_found_in_different_spellings(name: str, found: str) -> None:
    assert device(name).name == found


def test_an_unknown_device_lists_the_nearest_names_and_a_command() -> None:
    with pytest.raises(UnknownName, match=r"'h10'.*nearest: .*h100.*pointsman simulate --list") as caught:
        device("h10")
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnknownName, match=r"'xyzzy-42'; nearest: \S+, \S+, \S+\. `pointsman simulate --list`"):
        device("xyzzy-42")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_a_source_and_plausible_figures(name: str) -> None:
    entry = DEVICES[name]
    assert "NVIDIA" in entry.source or "AMD" in entry.source
    assert 15e9 < entry.memory < 300e9
    assert 0.3e12 <= entry.bandwidth < 10e12
    assert 70 <= entry.board_watts <= 1000
    assert (entry.link == "pcie") == (entry.link_bandwidth <= 64e9)
    assert 1.5 <= entry.flops("bf16") / entry.flops("fp32") <= 40
    # Figures with sparsity are twice as high: fp8 is dense twice bf16 on all of them.
    if "fp8" in entry.peak_flops:
        assert entry.flops("fp8") == pytest.approx(2 * entry.flops("bf16"), rel=0.02)


def test_a_dtype_that_the_device_lacks_runs_in_the_next_wider_one() -> None:
    a100 = device("a100")
    assert a100.flops("fp8") == a100.flops("bf16")
    assert a100.flops("int8") == 2 * a100.flops("bf16")


def test_measure_cpu_returns_figures_of_this_machine() -> None:
    cpu = measure_cpu(seconds=0.05)
    assert cpu.name == "cpu"
    assert 1e8 < cpu.bandwidth < 2e12
    assert 1e8 < cpu.flops("bf16") == cpu.flops("fp32") < 1e14
    assert cpu.memory > 2**28
    assert cpu.link_bandwidth == 0


def test_an_unreported_memory_size_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sysconf")
    with pytest.raises(SimulationError, match=r"measure_cpu\(memory=BYTES\)"):
        measure_cpu()


def test_a_given_memory_size_overrides_the_measured_one() -> None:
    assert measure_cpu(seconds=0, memory=2**33).memory == 2**33


# ---------------------------------------------------------------------- power


def test_power_rises_from_idle_to_the_board_power_with_the_busy_time() -> None:
    h100 = device("h100")
    assert h100.watts(1) == 700
    assert h100.watts(0) == pytest.approx(140)
    assert h100.watts(0.5) == pytest.approx(420)
    assert replace(h100, idle_watts=100.0).watts(0.25) == pytest.approx(250)


@pytest.mark.parametrize("busy", [-0.1, 1.1])
def test_error_names_a_share_of_busy_time_out_of_range(busy: float) -> None:
    with pytest.raises(SimulationError, match=f"busy is {busy}"):
        device("h100").watts(busy)


def test_unknown_power_is_an_error_with_a_remedy() -> None:
    with pytest.raises(SimulationError, match=r"power of my-gpu is not known; .*watts="):
        device("name=my-gpu,memory=32GiB,bandwidth=1792GB/s,bf16=209.5TFLOPS").watts(0.5)


# ---------------------------------------------------------------------- described devices

TEXT = "name=my-gpu, memory=32GiB, bandwidth=1792GB/s, bf16=209.5TFLOPS, fp8=419 TFLOP/s, link=64GB/s, watts=575"


def test_a_device_is_described_by_a_text_or_a_json_file(tmp_path: Path) -> None:
    mine = device(TEXT)
    assert (mine.name, mine.memory, mine.bandwidth) == ("my-gpu", 32 * 2**30, 1792e9)
    assert mine.peak_flops == {"bf16": 209.5e12, "fp8": 419e12}
    assert (mine.link_bandwidth, mine.link, mine.watts(1), mine.kind) == (64e9, "pcie", 575, "data-centre")
    path = tmp_path / "my-gpu.json"
    values = {"memory": 32 * 2**30, "bandwidth": "1.792TB/s", "bf16": 209.5e12, "fp8": "0.419PFLOPS", "watts": 575}
    path.write_text(json.dumps(values | {"link": "64GB/s"}))
    assert device(str(path)) == mine


def test_a_described_device_needs_fp32_only_for_fp32_models() -> None:
    mine = device(TEXT)
    assert mine.flops("int8") == mine.flops("bf16")
    with pytest.raises(SimulationError, match=r"my-gpu has no FLOP/s for fp32; .*fp32="):
        mine.flops("fp32")
    assert device(f"{TEXT},fp32=105TFLOPS,kind=geforce,nvlink=true").flops("fp32") == 105e12


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("memory=32GiB,bandwidth=1TB/s", "has no bf16; write for example name="),
        ("bandwidth=1TB/s,bf16=100TFLOPS", "has no memory"),
        ("memory=32GiB,bandwidth=1TB/s,bf16=100TFLOPS,speed=3", "has 'speed'; known are .*bandwidth"),
        ("memory=32GiB,bandwidth=1TB,bf16=100TFLOPS", "bandwidth is '1TB'; .*GB/s"),
        ("memory=-1,bandwidth=1TB/s,bf16=100TFLOPS", "memory is '-1'"),
        ("memory=0,bandwidth=1TB/s,bf16=100TFLOPS", "memory is '0'; it must be above 0"),
        ("memory=32GiB,memory=3GiB", "memory twice"),
        ("memory=32GiB,bandwidth", "has 'bandwidth'; write"),
        ("memory=32GiB,bandwidth=1TB/s,bf16=100TFLOPS,kind=toaster", "kind is 'toaster'; .*geforce"),
        ("memory=32GiB,bandwidth=1TB/s,bf16=100TFLOPS,nvlink=maybe", "nvlink is 'maybe'"),
    ],
)
def test_error_names_the_wrong_figure_of_a_description(text: str, match: str) -> None:
    with pytest.raises(SimulationError, match=match):
        device(text)


@pytest.mark.parametrize(
    ("text", "match"), [("[1]", "not a JSON object"), ("{", "not JSON"), ('{"bf16": true}', "True")]
)
def test_error_names_the_file_of_a_wrong_description(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(SimulationError, match=rf"gpu\.json: .*{match}"):
        device(str(path))


def test_a_missing_description_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        device(str(tmp_path / "none.json"))


def test_descriptions_may_hold_numbers_in_base_units() -> None:
    mine = described_device({"memory": 2**33, "bandwidth": 1e12, "bf16": 1e14, "nvlink": True, "link": 1e11})
    assert (mine.memory, mine.link, mine.name) == (2**33, "nvlink", "described device")
