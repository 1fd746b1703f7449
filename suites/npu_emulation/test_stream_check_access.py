"""Which bytes an operator accesses, where they are, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.library import _scoped_library

from afd_testkit.npu import stream_state, streams
from afd_testkit.npu.stream_check import (
    Place,
    StreamCheck,
    check_streams,
    mark,
    op_body,
)
from afd_testkit.npu.streams import Stream, current_stream

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No observer, no mode and no stream but the default one, before and after."""
    stream_state.reset_streams()
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    yield
    assert stream_state.observer() is None
    assert modes == (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack())
    assert current_stream() == streams.default_stream()


@pytest.fixture
def check() -> Iterator[StreamCheck]:
    """A check that collects."""
    with check_streams(on_hazard="collect") as found:
        yield found


def on(stream: Stream, work: Callable[[], object]) -> None:
    """Do ``work`` on ``stream``."""
    with streams.stream(stream):
        work()


def kinds(check: StreamCheck) -> list[tuple[str, str]]:
    """Each hazard as (earlier, later), ``"r"`` or ``"w"``."""
    return [
        ("w" if found.earlier.writes else "r", "w" if found.later.writes else "r")
        for found in check.hazards
    ]


def written_on(side: Stream) -> torch.Tensor:
    """Four numbers that ``side`` has just written, the default stream's work before it."""
    value = torch.zeros(4)
    side.wait_stream(current_stream())
    on(side, lambda: value.add_(1))
    return value


def test_parts_that_share_nothing_need_no_order(check: StreamCheck) -> None:
    table, side = torch.zeros(6, 8), Stream()
    side.wait_stream(current_stream())
    on(side, lambda: table[:3].add_(1))
    table[3:].add_(1)
    current_stream().wait_stream(side)
    side.wait_stream(current_stream())
    on(side, lambda: table[:, :4].add_(1))
    table[:, 4:].add_(1)
    assert check.hazards == []


@pytest.mark.parametrize(
    "part",
    [
        lambda table: table[2:],
        lambda table: table.view(-1)[20:30],
        lambda table: table.t(),
        lambda table: table[:, 3:5],
        lambda table: table[::2],
        lambda table: table.view(torch.int32),
        lambda table: table.detach().unsqueeze(0).expand(2, 6, 8),
    ],
)
def test_a_view_is_the_same_memory(
    check: StreamCheck, part: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    table, side = torch.zeros(6, 8), Stream()
    side.wait_stream(current_stream())
    on(side, lambda: table[2:3, 4:].add_(1))
    part(table) + 1
    assert kinds(check) == [("w", "r")]


def test_making_a_view_is_no_access(check: StreamCheck) -> None:
    side = Stream()
    value = written_on(side)
    value.view(2, 2)[0].unsqueeze(0).expand(3, 2).t().split(1)
    with torch.inference_mode():
        value.reshape(2, 2)
    assert check.hazards == []


def test_composed_operators_are_seen_in_inference_mode(check: StreamCheck) -> None:
    side = Stream()
    with torch.inference_mode():
        value = torch.zeros(2, 3)
        side.wait_stream(current_stream())
        on(side, lambda: value.add_(1))
        value.t().reshape(6)
    assert kinds(check) == [("w", "r")]


def test_two_storages_of_one_array_are_the_same_memory(check: StreamCheck) -> None:
    array, side = np.zeros(4, np.float32), Stream()
    first, second = torch.from_numpy(array), torch.from_numpy(array)
    mark(first, Place.DEVICE)
    on(side, lambda: first.add_(1))
    second + 1
    assert kinds(check) == [("w", "r")]


def test_memory_that_is_used_again_is_other_memory(check: StreamCheck) -> None:
    side, addresses = Stream(), []
    for number in range(50):
        stream = side if number % 2 else current_stream()
        with streams.stream(stream):
            value = torch.zeros(1 << 12)
            value.add_(1)
            addresses.append(value.data_ptr())
            del value
    assert len(set(addresses)) < len(addresses)
    assert check.hazards == []


def test_a_resized_tensor_has_other_memory(check: StreamCheck) -> None:
    side = Stream()
    value = written_on(side)
    value.resize_(1 << 12)
    value.zero_()
    assert check.hazards == []


# How operators say what they write.


def test_out_arguments_are_written(check: StreamCheck) -> None:
    value, side = torch.ones(4), Stream()
    side.wait_stream(current_stream())
    on(side, lambda: torch.add(torch.ones(4), 1, out=value))
    value + 1
    assert kinds(check) == [("w", "r")]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_copy_on_the_device_is_a_kernel(check: StreamCheck, non_blocking: bool) -> None:
    source, target, side = torch.ones(4), torch.zeros(4), Stream()
    side.wait_stream(current_stream())
    on(side, lambda: target.copy_(source, non_blocking=non_blocking))
    target + 1
    assert kinds(check) == [("w", "r")]


def test_an_index_put_writes_its_target(check: StreamCheck) -> None:
    cache, slots, side = torch.zeros(8, 2), torch.tensor([1, 5]), Stream()
    side.wait_stream(current_stream())
    on(side, lambda: cache.index_put_((slots,), torch.ones(2, 2)))
    cache + 1
    assert kinds(check) == [("w", "r")]


def test_a_custom_operator_s_mutation_is_a_write(check: StreamCheck) -> None:
    with _scoped_library("afd_stream_test", "FRAGMENT") as library:
        library.define("fill(Tensor x, Tensor(a!) out) -> ()")
        library.impl("fill", lambda x, out: [out.copy_(x)].clear(), "CPU")
        value, given, side = torch.zeros(4), torch.ones(4), Stream()
        side.wait_stream(current_stream())
        on(side, lambda: torch.ops.afd_stream_test.fill(given, value))
        given + 1
        assert check.hazards == []
        value + 1
        assert kinds(check) == [("w", "r")]
        assert "afd_stream_test::fill writes" in check.hazards[0].message


def test_an_opened_body_is_checked_instead_of_its_operator(check: StreamCheck) -> None:
    side = Stream()

    def body(x: torch.Tensor) -> torch.Tensor:
        with op_body():
            doubled = torch.empty_like(x)
            side.wait_stream(current_stream())
            on(side, lambda: torch.mul(x, 2, out=doubled))
            return doubled + 1

    with _scoped_library("afd_stream_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", body, "CPU")
        assert torch.ops.afd_stream_test.twice(torch.ones(2)).tolist() == [3, 3]
    assert "aten::mul.out writes" in check.hazards[0].message
    assert kinds(check) == [("w", "r")]


def test_factories_read_nothing_and_empty_writes_nothing(check: StreamCheck) -> None:
    value = written_on(Stream())
    torch.empty_like(value)
    torch.zeros_like(value)
    value.new_ones(2)
    assert check.hazards == []
    made = torch.empty(4)
    on(Stream(), lambda: made.fill_(1))
    assert check.hazards == []
    filled = torch.zeros_like(made)
    on(Stream(), lambda: filled.fill_(1))
    assert kinds(check) == [("w", "w")]


def test_collectives_write_their_first_argument(check: StreamCheck, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        total, side = torch.ones(4), Stream()
        side.wait_stream(current_stream())
        on(side, lambda: dist.all_reduce(total))
        total + 1
        assert kinds(check) == [("w", "r")]
        assert "c10d::allreduce_ writes" in check.hazards[0].message
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "read",
    [
        lambda value: value.tolist(),
        lambda value: value.numpy(),
        lambda value: np.asarray(value),
        lambda value: value.cpu(),
        lambda value: value.to("cpu"),
        lambda value: value[0].item(),
        lambda value: bool(value[0]),
        lambda value: value.nonzero(),
    ],
)
class TestReadsByTheHost:
    """They come after the current stream's work, and after no other's."""

    def test_of_another_stream_s_work(
        self, check: StreamCheck, read: Callable[[torch.Tensor], object]
    ) -> None:
        read(written_on(Stream()))
        assert kinds(check) == [("w", "r")]

    def test_of_the_current_stream_s_work(
        self, check: StreamCheck, read: Callable[[torch.Tensor], object]
    ) -> None:
        value = torch.ones(4)
        read(value)
        # The host has waited: another stream may follow without a wait of its own.
        on(Stream(), lambda: value.add_(1))
        assert check.hazards == []


def test_an_asynchronous_move_to_the_host_does_not_wait(check: StreamCheck) -> None:
    value = torch.ones(4)
    value.to("cpu", non_blocking=True)
    on(Stream(), lambda: value.add_(1))
    assert kinds(check) == [("w", "w"), ("r", "w")]


def pinned() -> torch.Tensor:
    """Host memory that copies use asynchronously."""
    value = torch.zeros(4)
    mark(value, Place.PINNED)
    return value


def test_a_copy_to_the_host_is_read_too_early(check: StreamCheck) -> None:
    target = pinned()
    target.copy_(torch.ones(4), non_blocking=True)
    target.tolist()
    assert kinds(check) == [("w", "r")]
    assert "the host" in check.hazards[0].message


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_copy_to_the_host_is_read_in_time(check: StreamCheck, non_blocking: bool) -> None:
    side, target = Stream(), pinned()
    value = torch.ones(4)
    side.wait_stream(current_stream())
    on(side, lambda: target.copy_(value, non_blocking=non_blocking))
    if non_blocking:
        side.record_event().synchronize()
    assert target.tolist() == [1, 1, 1, 1]
    assert check.hazards == []


def test_a_pinned_source_is_overwritten_too_early(check: StreamCheck) -> None:
    source, target = pinned(), torch.zeros(4)
    target.copy_(source, non_blocking=True)
    source.fill_(1)
    assert kinds(check) == [("r", "w")]


def test_a_pageable_source_may_be_overwritten(check: StreamCheck) -> None:
    source, target = torch.from_numpy(np.zeros(4, np.float32)), torch.zeros(4)
    target.copy_(source, non_blocking=True)
    source.fill_(1)
    assert check.hazards == []


def test_operators_on_host_memory_need_no_streams(check: StreamCheck) -> None:
    value = torch.zeros(4, device="cpu")
    on(Stream(), lambda: value.add_(1))
    on(Stream(), lambda: (value * 2).add_(value))
    assert check.hazards == []


def test_host_memory_is_told_by_how_it_is_made(check: StreamCheck) -> None:
    assert check.place_of(torch.zeros(2, device="cpu")) is Place.HOST
    assert check.place_of(torch.from_numpy(np.zeros(2))) is Place.HOST
    assert check.place_of(torch.zeros(2)) is Place.DEVICE
    assert check.place_of(torch.tensor([1, 2])) is Place.HOST
    assert check.place_of(torch.tensor([1, 2], device=torch.device("cpu"))) is Place.DEVICE
    assert check.place_of(torch.zeros(2, device="cpu") * 2) is Place.HOST
    moved = torch.zeros(2, device="cpu").to(torch.device("cpu"))
    assert check.place_of(moved) is Place.DEVICE


def test_what_has_no_device_may_be_the_host_s() -> None:
    with check_streams(unplaced=Place.HOST) as check:
        assert check.place_of(torch.zeros(2)) is Place.HOST
        assert check.place_of(torch.zeros(2, device=torch.device("cpu"))) is Place.DEVICE


def test_a_factory_with_a_device_is_a_kernel_there() -> None:
    with check_streams(on_hazard="collect", unplaced=Place.HOST) as check:
        value = torch.ones(4, device=torch.device("cpu"))
        on(Stream(), lambda: value + 1)
    assert kinds(check) == [("w", "r")]
