"""Devices: how many, which is selected, what they say of themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from afd_testkit.npu import stream_state
from afd_testkit.npu.device import VISIBLE, EmulatedDevices
from afd_testkit.npu.errors import EmulationError, NotEmulated
from afd_testkit.npu.install import emulated
from afd_testkit.npu.settings import CANN_VERSION, EmulationSettings

pytestmark = pytest.mark.cpu


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevices]:
    monkeypatch.delenv(VISIBLE, raising=False)
    stream_state.reset_streams()
    yield EmulatedDevices(EmulationSettings(devices=4))
    stream_state.reset_streams()


def test_the_settings_say_how_many(devices: EmulatedDevices) -> None:
    assert devices.device_count() == 4
    assert devices.is_available() is True


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("2", 1), ("0,3", 2), ("0, 1,2", 3)])
def test_visible_devices_count(
    devices: EmulatedDevices, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    assert devices.device_count() == count
    assert devices.is_available() is (count > 0)


@pytest.mark.parametrize("given", [2, "npu:2"])
def test_a_device_is_selected(devices: EmulatedDevices, given: object) -> None:
    devices.set_device(given)
    assert devices.current_device() == 2


@pytest.mark.parametrize("given", [4, "npu:7"])
def test_a_device_beyond_the_visible_ones_is_refused(
    devices: EmulatedDevices, given: object
) -> None:
    with pytest.raises(EmulationError, match=r"4 emulated device.*AFD_NPU_DEVICES"):
        devices.set_device(given)
    assert devices.current_device() == 0


@pytest.mark.parametrize("given", ["cuda:0", "npus"])
def test_another_kind_of_device_is_refused(devices: EmulatedDevices, given: object) -> None:
    with pytest.raises((EmulationError, ValueError), match="NPU"):
        devices.set_device(given)


def test_a_context_selects_and_restores(devices: EmulatedDevices) -> None:
    devices.set_device(1)
    with devices.device(3):
        assert devices.current_device() == 3
    assert devices.current_device() == 1
    with pytest.raises(IndexError), devices.device("npu:2"):
        [].pop()
    assert devices.current_device() == 1


def test_threads_select_for_themselves(devices: EmulatedDevices) -> None:
    devices.set_device(1)
    seen = []

    def run() -> None:
        devices.set_device(3)
        seen.append(devices.current_device())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [3]
    assert devices.current_device() == 1


# vLLM-Ascend 0.23.0 takes 220 to 225 for A2 and 250 to 255 for A3 (vllm_ascend/utils.py).
@pytest.mark.parametrize(("soc", "low", "high"), [("A2", 220, 225), ("A3", 250, 255)])
def test_the_soc_is_told_by_its_number(soc: str, low: int, high: int) -> None:
    with emulated(EmulationSettings(soc=soc)):
        assert low <= torch.npu.get_soc_version() <= high
        assert torch.npu.get_device_name().startswith("Ascend910")


def test_memory_is_not_counted() -> None:
    with emulated():
        free, total = torch.npu.mem_get_info()
        assert free == total == torch.npu.get_device_properties(0).total_memory
        _ = torch.zeros(1 << 16, device="npu")
        assert torch.npu.memory_allocated() == torch.npu.memory.max_memory_allocated() == 0
        assert torch.npu.mem_get_info() == (free, total)
        torch.npu.empty_cache()


def test_torch_asks_for_the_accelerator() -> None:
    with emulated(EmulationSettings(devices=3)):
        assert torch.accelerator.is_available()
        assert torch.accelerator.device_count() == torch.npu.device_count() == 3
        assert torch.accelerator.current_accelerator() == torch.device("cpu")
        torch.accelerator.set_device_index(2)
        assert torch.accelerator.current_device_index() == torch.npu.current_device() == 2
        assert torch.version.cann == CANN_VERSION
    assert not hasattr(torch.version, "cann")
    assert not hasattr(torch, "npu")


def test_random_state_is_the_hosts() -> None:
    state = torch.get_rng_state()
    try:
        with emulated():
            torch.npu.manual_seed_all(11)
            first = torch.rand(3, device="npu")
        torch.manual_seed(11)
        assert torch.equal(torch.rand(3), first)
    finally:
        torch.set_rng_state(state)


def test_a_pool_has_a_name_and_no_graph_goes_into_it() -> None:
    with emulated():
        assert torch.npu.graph_pool_handle() != torch.npu.graph_pool_handle()
        with pytest.raises(NotEmulated, match=r"torch\.npu\.NPUGraph\(\)"):
            torch.npu.NPUGraph()
