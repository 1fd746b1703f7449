"""A missing order is caught, an existing one is not, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from afd_testkit.npu import stream_state, streams
from afd_testkit.npu.errors import EmulationConflict, StreamHazard
from afd_testkit.npu.stream_check import (
    StreamCheck,
    check_streams,
)
from afd_testkit.npu.streams import Event, Stream, current_stream, synchronize

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


# What orders a write on a side stream before a read on the default one.


def by_wait_event(side: Stream) -> None:
    current_stream().wait_event(side.record_event())


def by_event_wait(side: Stream) -> None:
    event = Event()
    event.record(side)
    event.wait()


def by_wait_stream(side: Stream) -> None:
    current_stream().wait_stream(side)


def by_event_synchronize(side: Stream) -> None:
    side.record_event().synchronize()


def by_event_query(side: Stream) -> None:
    assert side.record_event().query()


def by_stream_synchronize(side: Stream) -> None:
    side.synchronize()


def by_device_synchronize(side: Stream) -> None:
    synchronize()


def by_blocking_read(side: Stream) -> None:
    on(side, lambda: torch.ones(1).item())


ORDERS = [
    by_wait_event,
    by_event_wait,
    by_wait_stream,
    by_event_synchronize,
    by_event_query,
    by_stream_synchronize,
    by_device_synchronize,
    by_blocking_read,
]


def written_on(side: Stream) -> torch.Tensor:
    """Four numbers that ``side`` has just written, the default stream's work before it."""
    value = torch.zeros(4)
    side.wait_stream(current_stream())
    on(side, lambda: value.add_(1))
    return value


@pytest.mark.parametrize("order", ORDERS)
def test_an_ordered_read_is_fine(check: StreamCheck, order: Callable[[Stream], None]) -> None:
    side = Stream()
    value = written_on(side)
    order(side)
    assert (value + 1).tolist() == [2, 2, 2, 2]
    assert check.hazards == []


def by_nothing(side: Stream) -> None:
    pass


def by_an_event_of_before(side: Stream) -> None:
    current_stream().wait_event(EVENTS[side])


def by_the_other_way_round(side: Stream) -> None:
    side.wait_stream(current_stream())


def by_synchronizing_the_wrong_stream(side: Stream) -> None:
    current_stream().synchronize()


def by_a_wait_of_a_third_stream(side: Stream) -> None:
    Stream().wait_stream(side)


def by_synchronizing_another_device(side: Stream) -> None:
    synchronize(1)


def by_an_event_never_recorded(side: Stream) -> None:
    event = Event()
    event.synchronize()
    event.wait()


EVENTS: dict[Stream, Event] = {}


@pytest.mark.parametrize(
    "order",
    [
        by_nothing,
        by_an_event_of_before,
        by_the_other_way_round,
        by_synchronizing_the_wrong_stream,
        by_a_wait_of_a_third_stream,
        by_synchronizing_another_device,
        by_an_event_never_recorded,
    ],
)
def test_a_read_without_order_is_caught(
    check: StreamCheck, order: Callable[[Stream], None]
) -> None:
    side = Stream()
    EVENTS[side] = side.record_event()
    value = written_on(side)
    order(side)
    value + 1
    assert kinds(check) == [("w", "r")]
    EVENTS.clear()


def test_reads_need_no_order(check: StreamCheck) -> None:
    value = torch.ones(4)
    first, second = Stream(), Stream()
    for stream in (first, second):
        stream.wait_stream(current_stream())
        on(stream, lambda: value + 1)
    value + 1
    assert check.hazards == []


def test_a_write_after_an_unordered_read_is_caught(check: StreamCheck) -> None:
    value, side = torch.ones(4), Stream()
    side.wait_stream(current_stream())
    on(side, lambda: value + 1)
    value.zero_()
    assert kinds(check) == [("r", "w")]


def test_a_write_after_every_read_is_ordered(check: StreamCheck) -> None:
    value, sides = torch.ones(4), [Stream(), Stream()]
    for side in sides:
        side.wait_stream(current_stream())
        on(side, lambda: value + 1)
    current_stream().wait_stream(sides[0])
    current_stream().wait_stream(sides[1])
    value.zero_()
    assert check.hazards == []


def test_one_of_two_reads_that_is_not_ordered_is_caught(check: StreamCheck) -> None:
    value, sides = torch.ones(4), [Stream(), Stream()]
    for side in sides:
        side.wait_stream(current_stream())
        on(side, lambda: value + 1)
    current_stream().wait_stream(sides[1])
    value.zero_()
    assert kinds(check) == [("r", "w")]


def test_two_unordered_writes_are_caught(check: StreamCheck) -> None:
    side = Stream()
    value = written_on(side)
    value.zero_()
    assert kinds(check) == [("w", "w")]


def test_order_is_transitive(check: StreamCheck) -> None:
    first, second, third = Stream(), Stream(), Stream()
    value = written_on(first)
    second.wait_stream(first)
    third.wait_event(second.record_event())
    on(third, lambda: value + 1)
    assert check.hazards == []
    # The default stream waits for none of them.
    value + 1
    assert kinds(check) == [("w", "r")]


def test_a_result_of_another_stream_is_caught(check: StreamCheck) -> None:
    side, results = Stream(), []
    on(side, lambda: results.append(torch.ones(4) * 2))
    results[0] + 1
    assert kinds(check) == [("w", "r")]


def first_access(value: torch.Tensor) -> None:
    value.mul_(2)


def second_access(value: torch.Tensor) -> None:
    torch.neg(value)


def test_a_hazard_is_raised_from_the_second_access_and_explains_itself() -> None:
    side = Stream()
    reached = []

    def program() -> None:
        value = torch.zeros(4, 6, dtype=torch.float16)
        side.wait_stream(current_stream())
        on(side, lambda: first_access(value[1:3]))
        reached.append(1)
        second_access(value)
        reached.append(2)

    with pytest.raises(StreamHazard) as raised, check_streams():
        program()
    assert reached == [1]
    text = str(raised.value)
    assert "read after write" in text
    assert "aten::mul_.Tensor writes float16[2, 6], bytes 12 to 36" in text
    assert "aten::neg reads float16[4, 6], bytes 0 to 48, on stream 0 of npu:0" in text
    assert f"on stream {side.stream_id} of npu:0" in text
    assert text.index("in first_access") < text.index("in second_access")
    assert f"{__file__}:{first_access.__code__.co_firstlineno + 1} in first_access" in text
    assert f"{__file__}:{second_access.__code__.co_firstlineno + 1} in second_access" in text
    assert "wait_event" in text
    assert "afd_testkit" not in text
    assert "torch/" not in text


def swallow_a_hazard() -> None:
    """A program that goes on after the report."""
    value = written_on(Stream())
    with pytest.raises(StreamHazard, match="read after write"):
        value + 1


def test_a_swallowed_hazard_is_raised_at_the_end() -> None:
    with pytest.raises(StreamHazard, match="read after write"), check_streams():
        swallow_a_hazard()


def fail_later() -> None:
    """A hazard, and then an error of another kind."""
    swallow_a_hazard()
    raise KeyError


def test_another_error_is_not_hidden() -> None:
    with pytest.raises(KeyError), check_streams():
        fail_later()


def test_the_same_two_places_are_reported_once(check: StreamCheck) -> None:
    side = Stream()
    for _ in range(3):
        value = written_on(side)
        value + 1
    assert len(check.hazards) == 1
    value = written_on(side)
    value + 1
    assert len(check.hazards) == 2


def test_one_check_at_a_time(check: StreamCheck) -> None:
    with pytest.raises(EmulationConflict, match="observed already"), check_streams():
        raise KeyError
    assert stream_state.observer() is check


def test_an_event_of_an_earlier_check_orders_nothing() -> None:
    side = Stream()
    with check_streams():
        written_on(side)
        written_on(side)
        old = side.record_event()
    with check_streams(on_hazard="collect") as check:
        value = written_on(side)
        current_stream().wait_event(old)
        value + 1
    assert kinds(check) == [("w", "r")]


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="on_hazard='warn'; choose 'raise' or 'collect'"):
        check_streams(on_hazard="warn").__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="host_threads='x'; choose 'together' or 'apart'"):
        check_streams(host_threads="x").__enter__()  # type: ignore[arg-type]
