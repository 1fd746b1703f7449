"""Devices: how many, which is selected, what they say of themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

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


# Indices that are written in a torch.device.


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.device("npu:5"),
        lambda: torch.device("npu", 5),
        lambda: torch.device(5),
        lambda: torch.device(type="npu", index=5),
        lambda: torch.device(torch.device("npu:5")),
    ],
    ids=["name", "type and index", "index", "keywords", "again"],
)
def test_a_torch_device_keeps_its_index(make: Callable[[], torch.device]) -> None:
    with emulated():
        device = make()
        assert device == torch.device("npu") == torch.zeros(1, device=device).device
        torch.npu.set_device(device)
        assert torch.npu.current_device() == 5
        assert torch.npu.get_device_properties(device).uuid.endswith("-5")
        with torch.npu.device(torch.device("npu:4")):
            assert torch.npu.current_device() == 4
            assert torch.npu.Stream(device=device).device_index == 5
        torch.npu.set_device(torch.device("npu"))  # without an index: the current one
        assert torch.npu.current_device() == 5


@pytest.mark.parametrize(
    "place",
    [
        lambda: torch.zeros(1, device="npu:99"),
        lambda: torch.zeros(1, device=99),
        lambda: torch.zeros(1, device=torch.device("npu:99")),
        lambda: torch.zeros(1).to("npu:99"),
        lambda: torch.zeros(1).to(99),
        lambda: torch.zeros(1).to(torch.device("npu", 99)),
        lambda: torch.npu.set_device(torch.device("npu:99")),
        lambda: torch.npu.get_device_properties(99),
    ],
)
def test_a_device_that_is_not_there_takes_nothing(place: Callable[[], object]) -> None:
    with emulated(), pytest.raises(EmulationError, match=r"device 99 .* sees 8 emulated"):
        place()


def test_an_index_that_no_device_has_is_refused() -> None:
    with emulated(), pytest.raises(ValueError, match="index 128 is out of range"):
        torch.device("npu:128")


@pytest.mark.parametrize(("visible", "wrong"), [("1,3,4", "4"), ("one", "one"), ("-1, 9", "-1, 9")])
def test_visible_devices_that_are_not_there_are_named(
    devices: EmulatedDevices, monkeypatch: pytest.MonkeyPatch, visible: str, wrong: str
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(EmulationError, match=rf"names {wrong}; .* devices 0 to 3\."):
        devices.device_count()


# What torch says of devices, and takes from elsewhere.


def test_generators_of_torch_itself_are_generators() -> None:
    with emulated():
        assert isinstance(torch.default_generator, torch.Generator)
        made = torch.Generator(device=0)
        assert isinstance(made, torch.Generator)
        assert made.device.type == "cpu"
        assert not isinstance(torch, torch.Generator)


def test_the_device_module_is_torch_npu() -> None:
    with emulated():
        for device in ("npu", "npu:1", torch.device("npu:1"), None):
            assert torch.get_device_module(device) is torch.npu
        assert torch.get_device_module("cpu") is torch.cpu
        assert torch.zeros(1, device="npu").is_npu
        assert not torch.zeros(1, device="meta").is_npu
    assert not hasattr(torch.Tensor, "is_npu")


@pytest.mark.parametrize("where", [0, "npu:1"])
def test_a_module_goes_to_the_device(where: object) -> None:
    with emulated():
        layer = torch.nn.Linear(2, 2).to(where, torch.float16)
        assert layer.weight.dtype == torch.float16
        assert layer.to(device=where).weight.device.type == "cpu"
        assert layer.to(torch.float32).weight.dtype == torch.float32
