"""What is meant for the NPU arrives at the CPU, and nothing else is touched."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from afd_testkit.npu import host_memory
from afd_testkit.npu.install import emulated
from afd_testkit.npu.redirect import RedirectMode, is_npu_name

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


@pytest.fixture
def redirect() -> Iterator[None]:
    """The mode alone."""
    with RedirectMode():
        yield


PLACED: dict[str, Callable[[], torch.Tensor]] = {
    "name": lambda: torch.zeros(2, device="npu"),
    "name with index": lambda: torch.zeros(2, device="npu:3"),
    "index alone": lambda: torch.zeros(2, device=0),
    "device object": lambda: torch.zeros(2, device=torch.device("npu")),
    "device of name and index": lambda: torch.zeros(2, device=torch.device("npu", 1)),
    "device of index": lambda: torch.zeros(2, device=torch.device(1)),
    "device of keyword": lambda: torch.zeros(2, device=torch.device(type="npu", index=0)),
    "to name": lambda: torch.zeros(2).to("npu"),
    "to index": lambda: torch.zeros(2).to(0),
    "to keyword": lambda: torch.zeros(2).to(device="npu:0", dtype=torch.float16),
    "to name and dtype": lambda: torch.zeros(2).to("npu", torch.float16),
    "like": lambda: torch.ones_like(torch.zeros(2), device="npu"),
    "new": lambda: torch.zeros(2).new_zeros(2, device="npu"),
    "full": lambda: torch.full((2,), 3, device="npu"),
    "pinned": lambda: torch.zeros(2, pin_memory=True),
    "pin": lambda: torch.zeros(2).pin_memory(),
}


@pytest.mark.parametrize("how", PLACED)
@pytest.mark.usefixtures("redirect")
def test_what_is_meant_for_the_npu_arrives_at_the_cpu(how: str) -> None:
    made = PLACED[how]()
    assert made.device == CPU
    assert not made.is_pinned()


@pytest.mark.parametrize("how", [how for how in PLACED if "pin" not in how])
def test_without_the_emulation_it_is_refused(how: str) -> None:
    # Each kind of torch has its own words: no such backend, no such device, no accelerator.
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        PLACED[how]()


@pytest.mark.usefixtures("redirect")
def test_other_devices_and_numbers_are_left_alone() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2).to("meta").device.type == "meta"
    assert torch.zeros(2).to(torch.float16).dtype == torch.float16
    x = torch.arange(6).view(2, 3)
    assert x.sum(0).tolist() == [3, 5, 7]
    assert x.transpose(0, 1).shape == (3, 2)
    assert torch.device("cpu") == CPU
    assert x.to(x.new_zeros(1, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("npu", True),
        ("npu:0", True),
        ("npu:12", True),
        ("npus", False),
        ("npu:", False),
        ("my npu", False),
        ("cpu", False),
        (0, False),
        (None, False),
    ],
)
def test_names_of_the_npu(value: object, expected: bool) -> None:
    assert is_npu_name(value) is expected


@pytest.mark.usefixtures("redirect")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_histograms_of_integers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 8, (100,), generator=generator, dtype=dtype)
    counted = Counter(values.tolist())
    got = torch.histc(values, bins=8, min=0, max=8)
    assert got.dtype == dtype
    assert got.tolist() == [counted[value] for value in range(8)]
    assert values.histc(bins=8, min=0, max=8).tolist() == got.tolist()


def in_thread(function: Callable[[], Any]) -> Any:
    """What the function returns, or raises, in a thread that is started now."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_threads_see_the_emulation_and_only_while_it_lasts() -> None:
    def place() -> str:
        return str(torch.zeros(1, device="npu").device)

    with emulated():
        assert in_thread(place) == "cpu"
        assert in_thread(lambda: in_thread(place)) == "cpu"
    assert isinstance(in_thread(place), RuntimeError)


def test_bodies_of_device_operators_see_the_emulation() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(x.shape, device="npu")

    with emulated(), torch.library._scoped_library("afd_redirect", "DEF") as library:
        library.define("plus_one(Tensor x) -> Tensor")
        library.impl("plus_one", body, "PrivateUse1")
        got = torch.ops.afd_redirect.plus_one(torch.zeros(3, device="npu"))
        assert got.tolist() == [1, 1, 1]


def test_generators_tensors_and_modules() -> None:
    with emulated():
        generator = torch.Generator(device="npu").manual_seed(5)
        assert generator.device == CPU
        assert isinstance(generator, torch.Generator)
        x = torch.arange(3.0)
        assert x.npu() is x
        layer = torch.nn.Linear(2, 2)
        assert layer.npu() is layer
        assert layer.to("npu").weight.device == CPU
    again = torch.Generator().manual_seed(5)
    expected = torch.rand(4, generator=again)
    assert torch.equal(torch.rand(4, generator=generator), expected)


MANY = 1 << 30  # bytes


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("redirect")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_large_zeros_take_memory_where_they_are_used(dtype: torch.dtype) -> None:
    rows = MANY // 1024 // dtype.itemsize
    before = resident()
    cache = torch.zeros(2, rows // 2, 1024, dtype=dtype, device="npu")
    assert resident() - before < MANY // 4
    assert (cache.dtype, cache.device) == (dtype, torch.device("cpu"))
    assert (cache.shape, cache.is_contiguous()) == ((2, rows // 2, 1024), True)
    cache[1, 3] = 5
    other = torch.zeros((rows, 1024), dtype=dtype, device="npu:0")
    assert int(cache[1, 3].sum(dtype=torch.int64)) == 5 * 1024
    assert int(cache[:, :100].sum(dtype=torch.int64)) == 5 * 1024
    assert int(other[:100].sum(dtype=torch.int64)) == 0
    assert not cache._is_view()
    assert cache.data_ptr() % 64 == 0


@pytest.mark.usefixtures("redirect")
def test_zeros_that_are_not_plain_are_torchs_own() -> None:
    count = host_memory.LARGE
    assert torch.zeros(count, device="meta").is_meta
    assert torch.zeros(count, device="npu", requires_grad=True).requires_grad
    out = torch.ones(count)
    assert torch.zeros(count, out=out) is out
    with torch.device("meta"):
        assert torch.zeros(count).is_meta
    with FakeTensorMode():
        assert isinstance(torch.zeros(count, device="npu"), FakeTensor)
