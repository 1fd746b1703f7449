"""The stream check with more than one host thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from afd_testkit.npu import stream_state, streams
from afd_testkit.npu.stream_check import (
    StreamCheck,
    check_streams,
    enter_thread,
)
from afd_testkit.npu.streams import Stream, current_stream, synchronize

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


def run_in_thread(work: Callable[[], None]) -> None:
    """``work`` in a thread of its own, which joins the check."""

    def run() -> None:
        with enter_thread():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_another_thread_needs_the_same_order(check: StreamCheck) -> None:
    side, value = Stream(), torch.zeros(4)
    side.wait_stream(current_stream())
    run_in_thread(lambda: on(side, lambda: value.add_(1)))
    value + 1
    assert kinds(check) == [("w", "r")]


def test_an_order_made_by_another_thread_counts(check: StreamCheck) -> None:
    side, value = Stream(), torch.zeros(4)
    side.wait_stream(current_stream())
    run_in_thread(lambda: on(side, lambda: value.add_(1)))
    run_in_thread(side.synchronize)
    value + 1
    assert check.hazards == []


def hand_over_while_both_run(wait_in_second: bool) -> StreamCheck:
    """A thread waits for a kernel, and another, which runs all the while, uses its result."""
    started, waited = threading.Event(), threading.Event()
    side = Stream()
    with check_streams(on_hazard="collect", host_threads="apart") as check:
        value = written_on(side)

        def work() -> None:
            with enter_thread():
                started.set()
                waited.wait(10)
                if wait_in_second:
                    side.synchronize()
                value + 1

        thread = threading.Thread(target=work)
        thread.start()
        started.wait(10)
        side.synchronize()
        waited.set()
        thread.join()
    return check


def test_threads_apart_do_not_rely_on_each_other_s_waits() -> None:
    assert kinds(hand_over_while_both_run(wait_in_second=False)) == [("w", "r")]
    assert hand_over_while_both_run(wait_in_second=True).hazards == []


def test_threads_apart_meet_where_they_start_and_end() -> None:
    side = Stream()
    with check_streams(host_threads="apart"):
        value = written_on(side)
        side.synchronize()
        run_in_thread(lambda: on(Stream(), lambda: value.add_(1)) or synchronize())
        value + 1


def test_a_thread_may_enter_without_a_check_and_outlive_one() -> None:
    run_in_thread(lambda: None)
    inside, left, results = threading.Event(), threading.Event(), []

    def work() -> None:
        with enter_thread():
            inside.set()
            left.wait(10)
            results.append(torch.ones(2).tolist())

    thread = threading.Thread(target=work)
    with check_streams():
        thread.start()
        inside.wait(10)
    left.set()
    thread.join()
    assert results == [[1, 1]]
