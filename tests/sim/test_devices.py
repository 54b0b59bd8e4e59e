"""Devices: names, figures, and this CPU measured."""

from __future__ import annotations

import pytest

from pointsman.sim.devices import DEVICES, device, measure_cpu
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
    ],
)
def test_device_names_are_found_in_different_spellings(name: str, found: str) -> None:
    assert device(name).name == found


def test_an_unknown_device_lists_the_nearest_names_and_a_command() -> None:
    with pytest.raises(UnknownName, match=r"'h10'.*nearest: .*h100.*pointsman simulate --list") as caught:
        device("h10")
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnknownName, match=r"known: .*H100-SXM.*cpu"):
        device("xyzzy-42")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_a_source_and_plausible_figures(name: str) -> None:
    entry = DEVICES[name]
    assert "NVIDIA" in entry.source or "AMD" in entry.source
    assert 20e9 < entry.memory < 300e9
    assert 0.5e12 < entry.bandwidth < 10e12
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
