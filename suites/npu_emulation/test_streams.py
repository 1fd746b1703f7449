"""Streams and events of the emulated NPU, without a check."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from afd_testkit.npu import stream_state, streams
from afd_testkit.npu.errors import EmulationConflict, NotEmulated
from afd_testkit.npu.streams import (
    Event,
    ExternalEvent,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    synchronize,
)

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No device chosen and default streams current, before and after."""
    stream_state.reset_streams()
    yield
    stream_state.reset_streams()


def in_thread(function: Any) -> Any:
    """The function's result in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class Recorder(stream_state.StreamObserver):
    """Writes down what it is told; its marks are numbers."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def recorded(self, stream: Stream) -> object:
        self.told.append(("recorded", stream))
        return len(self.told)

    def waited(self, stream: Stream, mark: object) -> None:
        self.told.append(("waited", stream, mark))

    def reached(self, mark: object) -> None:
        self.told.append(("reached", mark))

    def drained(self, stream: Stream) -> None:
        self.told.append(("drained", stream))

    def drained_device(self, index: int) -> None:
        self.told.append(("drained device", index))


@pytest.fixture
def observed() -> Iterator[Recorder]:
    """An observer that is told inside the test."""
    recorder = Recorder()
    stream_state.observe(recorder)
    yield recorder
    stream_state.stop_observing(recorder)


def test_streams_are_equal_by_device_and_id() -> None:
    stream = Stream(device=1)
    same = Stream(stream_id=stream.stream_id, device_index=1, device_type=20)
    assert stream == same
    assert (stream != same) is False
    assert hash(stream) == hash(same)
    assert stream != Stream(device=1)
    assert stream != Stream(stream_id=stream.stream_id, device_index=0)
    assert stream != "a stream"
    assert isinstance(stream, torch.Stream)
    assert stream.device_index == 1


@pytest.mark.parametrize(
    ("device", "index"),
    [(None, 3), (0, 0), (2, 2), (-1, 3), ("npu", 3), ("npu:1", 1)],
)
def test_a_device_is_given_in_many_ways(device: object, index: int) -> None:
    stream_state.set_device_index(3)
    assert Stream(device).device_index == index
    assert current_stream(device).device_index == index
    assert default_stream(device) == Stream(stream_id=0, device_index=index)


def test_the_cpu_stands_for_the_current_device() -> None:
    stream_state.set_device_index(2)
    assert Stream(torch.device("cpu")).device_index == 2
    assert Stream(torch.device("privateuseone", 1)).device_index == 1


@pytest.mark.parametrize("device", ["cuda", "npu:x", "npu:-1", torch.device("cuda", 0)])
def test_another_kind_of_device_is_refused(device: object) -> None:
    with pytest.raises(ValueError, match="is no NPU"):
        Stream(device)


@pytest.mark.parametrize("device", [1.0, True, [0]])
def test_a_device_of_another_type_is_refused(device: object) -> None:
    with pytest.raises(TypeError, match="a device is an int"):
        current_stream(device)


def test_stream_arguments_are_checked() -> None:
    assert Stream(priority=-1).priority == -1
    with pytest.raises(TypeError, match="priority is an int, not str"):
        Stream(priority="high")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device_type 1 is no NPU"):
        Stream(device_type=1)
    with pytest.raises(TypeError, match="capture"):
        Stream(capture=True)  # type: ignore[call-arg]


def test_wrong_operands_are_refused_by_type() -> None:
    stream, event = Stream(), Event()
    calls: list[tuple[Any, Any]] = [
        (stream.wait_event, stream),
        (stream.wait_stream, event),
        (stream.record_event, stream),
        (event.record, event),
        (event.wait, event),
        (set_stream, event),
        (StreamContext, event),
        (event.elapsed_time, stream),
    ]
    for call, operand in calls:
        with pytest.raises(TypeError, match=r"takes a torch\.npu\.(Stream|Event), not"):
            call(operand)


def test_handles_are_pointers() -> None:
    stream, event = Stream(), Event()
    assert default_stream(0).npu_stream == 0
    assert stream._as_parameter_.value == stream.npu_stream == stream.native_handle
    assert stream.npu_stream != Stream().npu_stream
    assert event.npu_event == 0
    event.record(stream)
    assert event.npu_event == event._as_parameter_.value != 0


def test_a_context_sets_and_restores_the_current_stream() -> None:
    outer, inner = Stream(), Stream()
    with streams.stream(outer):
        assert current_stream() == outer
        with inner:
            assert current_stream() == inner
        with streams.stream(None):
            assert current_stream() == outer
    assert current_stream() == default_stream()


def test_a_context_restores_after_an_error_and_may_be_entered_again() -> None:
    stream = Stream()
    context = streams.stream(stream)
    with pytest.raises(KeyError), context:
        raise KeyError
    assert current_stream() == default_stream()
    with context, context:
        assert current_stream() == stream
    assert current_stream() == default_stream()


def test_a_context_of_another_device_restores_the_device() -> None:
    other = Stream(device=1)
    with streams.stream(other):
        assert stream_state.current_device_index() == 1
        assert current_stream() == other
        assert current_stream(0) == default_stream(0)
    assert stream_state.current_device_index() == 0
    assert current_stream(1) == default_stream(1)


def test_set_stream_stays_and_none_changes_nothing() -> None:
    stream = Stream()
    set_stream(stream)
    set_stream(None)
    assert current_stream() == stream


def test_each_thread_has_its_own_current_stream() -> None:
    set_stream(Stream())
    assert in_thread(current_stream) == default_stream()


def test_a_thread_that_chose_no_device_uses_the_process_s() -> None:
    stream_state.set_device_index(2)
    assert in_thread(stream_state.current_device_index) == 2


def test_events_know_whether_they_are_recorded() -> None:
    event = Event()
    assert event.query()
    assert event.device is None
    event.synchronize()
    event.wait()
    assert Stream().record_event(event) is event
    assert event.device == torch.device("privateuseone", 0)
    assert isinstance(event, torch.Event)


def test_an_event_stays_on_its_device() -> None:
    event = Stream(device=0).record_event()
    event.wait(Stream(device=1))
    with pytest.raises(ValueError, match="belongs to npu:0"):
        event.record(Stream(device=1))


def test_elapsed_time_is_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1_000_000, 3_500_000])
    monkeypatch.setattr(streams.time, "perf_counter_ns", lambda: next(clock))
    start, end = Event(enable_timing=True), Event(True)
    start.record()
    end.record()
    assert start.elapsed_time(end) == 2.5
    assert end.recorded_time() == 3_500


def test_elapsed_time_needs_timed_and_recorded_events() -> None:
    timed = Event(enable_timing=True)
    timed.record()
    with pytest.raises(ValueError, match="end event is not recorded"):
        timed.elapsed_time(Event(enable_timing=True))
    untimed = current_stream().record_event()
    with pytest.raises(ValueError, match="start event takes no time"):
        untimed.elapsed_time(timed)
    with pytest.raises(ValueError, match="two Event"):
        ExternalEvent().elapsed_time(timed)
    with pytest.raises(ValueError, match="not recorded"):
        Event().recorded_time()


def test_torch_event_s_way_to_name_a_device_is_taken() -> None:
    Event(device="npu:0")
    Event("npu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is no NPU"):
        Event(device="cuda")


def test_what_cannot_be_emulated_is_refused() -> None:
    with pytest.raises(NotEmulated, match="ipc_handle"):
        Event(interprocess=True).ipc_handle()
    with pytest.raises(NotEmulated, match="from_ipc_handle"):
        Event.from_ipc_handle(0, b"")
    event = ExternalEvent()
    with pytest.raises(NotEmulated, match="before its record"):
        event.wait()
    event.record()
    event.wait()
    event.reset()
    with pytest.raises(NotEmulated, match="before its record"):
        event.wait(Stream())


def test_record_stream_checks_its_types() -> None:
    streams.record_stream(torch.ones(1), Stream())
    with pytest.raises(TypeError, match=r"takes a torch\.npu\.Stream"):
        streams.record_stream(torch.ones(1), Event())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a tensor"):
        streams.record_stream(Event(), Stream())  # type: ignore[arg-type]


def test_the_observer_is_told_every_order(observed: Recorder) -> None:
    first, second, event = Stream(), Stream(), ExternalEvent()
    event.record(first)
    event.wait(second)
    event.synchronize()
    first.synchronize()
    assert first.query()
    synchronize(1)
    second.wait_stream(first)
    assert observed.told == [
        ("recorded", first),
        ("waited", second, 1),
        ("reached", 1),
        ("drained", first),
        ("drained", first),
        ("drained device", 1),
        ("recorded", first),
        ("waited", second, 7),
    ]


def test_an_event_is_recorded_and_awaited_on_the_current_stream(observed: Recorder) -> None:
    stream, event = Stream(), Event()
    with stream:
        event.record()
    event.wait()
    assert observed.told == [("recorded", stream), ("waited", default_stream(), 1)]


def test_there_is_one_observer(observed: Recorder) -> None:
    with pytest.raises(EmulationConflict, match="observed already"):
        stream_state.observe(Recorder())
    stream_state.stop_observing(Recorder())
    assert stream_state.observer() is observed


def test_exported_names() -> None:
    assert streams.__all__ == [
        "Event",
        "ExternalEvent",
        "Stream",
        "StreamContext",
        "SyncLaunchStream",
        "current_stream",
        "default_stream",
        "set_stream",
        "stream",
        "synchronize",
    ]
