"""The shares of several engines on a machine with GPUs, as options of the engine processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.server import shares
from pointsman.server.shares import check_memory, share_out

GPUS = ("cuda:0", "cuda:1")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores and two GPUs."""
    monkeypatch.setattr(shares, "usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(shares, "num_cores", lambda: 4)
    monkeypatch.setattr(shares, "visible_gpus", lambda: GPUS)


@pytest.mark.parametrize("given", [{}, {"device": "auto"}, {"device": "cuda"}])
def test_each_engine_has_a_gpu_of_its_own(given: dict[str, str]) -> None:
    found = share_out({"model": "demo", **given}, 2, "f")
    assert [share.options for share in found] == [{"model": "demo", "device": device} for device in GPUS]
    assert [share.cores for share in found] == [[0, 1], [2, 3]]
    assert [share.record for share in found] == ["f", "f.1"]


def test_host_memory_is_divided_but_gpu_memory_is_not() -> None:
    options = {"model": "demo", "gpu_memory_utilization": 0.8, "kv_offload_bytes": 101}
    for size in ({"num_blocks": 7}, {"kv_cache_bytes": 1 << 60}, {}):  # 1 EiB is no matter of the host's memory
        for share, device in zip(share_out({**options, **size}, 2), GPUS, strict=True):
            assert share.options == {**options, **size, "kv_offload_bytes": 50, "device": device}


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_engines_than_gpus_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as caught:
        share_out({"model": "demo", "device": device}, 3)
    assert str(caught.value) == (
        "data_parallel_size is 3 and PyTorch sees 2 GPU(s) (cuda:0, cuda:1); each engine needs a GPU of its own, so "
        "lower data_parallel_size to 2, or make more GPUs visible with CUDA_VISIBLE_DEVICES"
    )
    monkeypatch.setattr(shares, "visible_gpus", tuple)
    with pytest.raises(
        ValueError, match=r"sees 0 GPU\(s\) \(none\); each engine needs a GPU of its own, so set device to cpu, or"
    ):
        share_out({"model": "demo", "device": "cuda"}, 3)


def test_one_gpu_for_several_engines_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"device is cuda:1 and data_parallel_size is 2; .*: set device to cuda, and select"
    ):
        share_out({"model": "demo", "device": "cuda:1"}, 2)
    assert share_out({"model": "demo", "device": "cuda:1"}, 1)[0].options["device"] == "cuda:1"


def test_without_a_gpu_or_with_device_cpu_cores_and_memory_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model": "demo", "num_blocks": 8}
    for given in ({"device": "cpu"}, {}):
        if not given:
            monkeypatch.setattr(shares, "visible_gpus", tuple)
        for share in share_out({**options, **given}, 2):
            assert share.options == {**options, **given, "num_blocks": 4}


def test_single_engine_gets_the_given_options() -> None:
    assert share_out({"model": "demo"}, 1)[0].options == {"model": "demo"}, "the engine chooses its device"


def test_host_memory_check_on_gpus_counts_offloaded_kv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:        1 kB\n")
    monkeypatch.setattr(shares, "MEMORY_INFO", tmp_path / "meminfo")
    options = {"model": "demo", "kv_cache_bytes": 1 << 30}
    with pytest.raises(ValueError, match="weights of each engine"):
        check_memory(options, 2)
    check_memory(options, 2, on_gpus=True)
    with pytest.raises(ValueError, match="lower kv_offload_bytes"):
        check_memory({**options, "kv_offload_bytes": 1 << 20}, 2, on_gpus=True)
