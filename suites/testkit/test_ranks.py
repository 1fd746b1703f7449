"""Ranks in processes: results, and what becomes of a rank that raises, dies or hangs."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from afd_testkit.ranks import Rank, RankFailure, RanksFailed, run_ranks

pytestmark = pytest.mark.cpu


@dataclasses.dataclass(frozen=True)
class Answer:
    """A class of this very module, which only pytest can import by name."""

    place: tuple[int, int]
    value: Any


class OwnError(Exception):
    pass


class StubbornError(Exception):
    """Cannot be pickled back: its constructor wants two arguments."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}, {why}")


def answer(rank: Rank, value: Any) -> Answer:
    return Answer((rank.rank, rank.world_size), value)


def shared_folder(rank: Rank) -> list[str]:
    (rank.folder / f"mark-{rank.rank}").touch()
    while len(marks := sorted(p.name for p in rank.folder.glob("mark-*"))) < rank.world_size:
        time.sleep(0.01)
    return [str(rank.folder), *marks]


def sums(rank: Rank) -> list[int]:
    import torch
    import torch.distributed as dist

    with rank.gloo() as group:
        assert dist.get_world_size(group) == rank.world_size
        value = torch.tensor([rank.rank + 1])
        dist.all_reduce(value)
    assert not dist.is_initialized()
    return value.tolist()


def environment(_rank: Rank, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def raise_on_one(rank: Rank, kind: str) -> str:
    if rank.rank == 1:
        print("said before it raised")
        raise StubbornError("it", "refuses") if kind == "stubborn" else OwnError("no luck")
    return "fine"


def die_on_one(rank: Rank, number: int) -> None:
    if rank.rank == 1:
        os.kill(os.getpid(), number)
        time.sleep(60)


def exit_on_one(rank: Rank, status: int) -> None:
    if rank.rank == 1:
        os._exit(status)


def crash(_rank: Rank) -> None:
    import faulthandler

    faulthandler._sigsegv()


def wait_in_a_place_with_a_name(folder: Path, number: int) -> NoReturn:
    (folder / f"pid-{number}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


def hang_on_one(rank: Rank, folder: Path) -> str:
    if rank.rank == 1:
        wait_in_a_place_with_a_name(folder, 1)
    return "fine"


def hang_beside_a_failure(rank: Rank, folder: Path) -> None:
    if rank.rank == 0:
        raise OwnError("first")
    wait_in_a_place_with_a_name(folder, rank.rank)


def hang_with_children(rank: Rank, folder: Path) -> None:
    code = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code])
    (folder / f"child-{rank.rank}").write_text(str(child.pid))
    wait_in_a_place_with_a_name(folder, rank.rank)


def return_and_leave_a_child(rank: Rank, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / f"child-{rank.rank}").write_text(str(child.pid))


def hold_at_exit(_rank: Rank) -> str:
    threading.Thread(target=time.sleep, args=(600,), name="not a daemon").start()
    return "returned"


def busy_deaf(rank: Rank, folder: Path) -> None:
    """Hangs where no Python runs, with the interpreter's lock held by a stopped process."""
    (folder / f"pid-{rank.rank}").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def unpicklable(_rank: Rank) -> Any:
    return threading.Lock()


def call_ranks_and_be_killed(_rank: Rank, folder: Path) -> None:
    def kill() -> None:
        until(lambda: len(written(folder)) == 4)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    run_ranks(2, hang_with_children, folder, timeout=300)


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def written(folder: Path, pattern: str = "*-?") -> list[int]:
    """The process ids that ranks and their children have noted so far."""
    texts = [path.read_text() for path in folder.glob(pattern)]
    return [int(text) for text in texts if text]


def until(condition: Any, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def failed(*arguments: Any, **options: Any) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(*arguments, **options)
    return caught.value


def test_results_come_in_order_of_ranks() -> None:
    results = run_ranks(3, answer, {"a": Answer((7, 8), None)})
    assert results == [Answer((rank, 3), {"a": Answer((7, 8), None)}) for rank in range(3)]


def test_one_rank() -> None:
    assert run_ranks(1, answer, "x") == [Answer((0, 1), "x")]


def test_a_function_of_the_library_needs_no_test_module() -> None:
    first, second = run_ranks(2, dataclasses.astuple)
    assert [first[:2], second[:2]] == [(0, 2), (1, 2)]


def test_ranks_share_a_folder_that_does_not_stay() -> None:
    first, second = run_ranks(2, shared_folder)
    assert first == second
    assert first[1:] == ["mark-0", "mark-1"]
    assert not Path(first[0]).exists()


def test_a_collective_over_gloo() -> None:
    assert run_ranks(3, sums) == [[6]] * 3


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFD_SOME", "outer")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("AFD_SOME", "AFD_MORE", "OMP_NUM_THREADS")
    before = dict(os.environ)
    assert run_ranks(1, environment, *names) == [["outer", None, "1"]]
    extra = {"AFD_SOME": "inner", "AFD_MORE": "2", "OMP_NUM_THREADS": "3"}
    assert run_ranks(1, environment, *names, env=extra) == [["inner", "2", "3"]]
    assert dict(os.environ) == before


def test_an_exception_in_a_rank() -> None:
    error = failed(2, raise_on_one, "own")
    assert error.results == {0: "fine"}
    (failure,) = error.failures
    assert (failure.rank, failure.kind) == (1, "raised")
    assert type(failure.error) is OwnError
    assert str(failure.error) == "no luck"
    for told in ("rank 1 raised of 2 ranks", "in raise_on_one", "no luck", "said before it raised"):
        assert told in str(error)


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    (failure,) = failed(2, raise_on_one, "stubborn").failures
    assert failure.error is None
    assert "StubbornError: it, refuses" in failure.text


def test_a_result_that_cannot_travel() -> None:
    (failure,) = failed(1, unpicklable).failures
    assert failure.kind == "raised"
    assert "cannot pickle" in failure.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_killed_by_a_signal(number: signal.Signals) -> None:
    error = failed(2, die_on_one, int(number))
    (failure,) = error.failures
    assert (failure.rank, failure.kind) == (1, "died")
    assert f"ended by {number.name}" in failure.text
    assert error.results == {0: None}


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_exits_without_an_outcome(status: int) -> None:
    (failure,) = failed(2, exit_on_one, status).failures
    assert (failure.rank, failure.kind) == (1, "died")
    assert f"ended with exit status {status}" in failure.text


def test_a_crash_shows_where() -> None:
    (failure,) = failed(1, crash).failures
    assert failure.kind == "died"
    assert "ended by SIGSEGV" in failure.text
    assert "in crash" in failure.text


def test_a_hanging_rank_is_killed_with_its_stack_shown(tmp_path: Path) -> None:
    begin = time.monotonic()
    error = failed(2, hang_on_one, tmp_path, timeout=6)
    assert time.monotonic() - begin < 15
    assert error.results == {0: "fine"}
    (failure,) = error.failures
    assert (failure.rank, failure.kind) == (1, "hung")
    for frame in ("in wait_in_a_place_with_a_name", "in hang_on_one"):
        assert frame in failure.text
    (pid,) = written(tmp_path, "pid-*")
    assert not is_running(pid)


def test_others_are_stopped_once_one_failed(tmp_path: Path) -> None:
    begin = time.monotonic()
    error = failed(3, hang_beside_a_failure, tmp_path, timeout=120, grace=2)
    assert time.monotonic() - begin < 30
    assert [(f.rank, f.kind) for f in error.failures] == [
        (0, "raised"),
        (1, "stopped"),
        (2, "stopped"),
    ]
    assert all("in wait_in_a_place_with_a_name" in f.text for f in error.failures[1:])
    assert not any(map(is_running, written(tmp_path, "pid-*")))


def test_children_of_a_hanging_rank_are_killed_too(tmp_path: Path) -> None:
    failed(2, hang_with_children, tmp_path, timeout=8)
    children = written(tmp_path, "child-*")
    assert len(children) == 2
    assert until(lambda: not any(map(is_running, children)))


def test_children_that_a_rank_leaves_behind_are_killed(tmp_path: Path) -> None:
    assert run_ranks(1, return_and_leave_a_child, tmp_path) == [None]
    assert until(lambda: not any(map(is_running, written(tmp_path, "child-*"))))


def test_a_rank_that_returns_but_does_not_end() -> None:
    (failure,) = failed(1, hold_at_exit, timeout=3).failures
    assert failure.kind == "hung"
    assert "_shutdown" in failure.text  # the interpreter, waiting for the thread


def test_a_rank_that_answers_no_signal(tmp_path: Path) -> None:
    (failure,) = failed(1, busy_deaf, tmp_path, timeout=2).failures
    assert failure.kind == "hung"
    assert "no stack" in failure.text
    assert not any(map(is_running, written(tmp_path, "pid-*")))


def test_nobody_survives_the_caller(tmp_path: Path) -> None:
    # The inner ranks have sessions of their own: only the closed pipe can tell them.
    (failure,) = failed(1, call_ranks_and_be_killed, tmp_path).failures
    assert "ended by SIGKILL" in failure.text
    assert len(written(tmp_path)) == 4
    assert until(lambda: not any(map(is_running, written(tmp_path))))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises here, also where a shell had it ignored for a run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_caller_leaves_nobody(tmp_path: Path) -> None:
    over = threading.Event()

    def interrupt() -> None:
        until(lambda: len(written(tmp_path)) == 2, 60)
        # Again if need be: Python drops an interrupt that falls into a finalizer.
        while not over.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            over.wait(5)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(1, hang_with_children, tmp_path, timeout=100)
    over.set()
    thread.join()
    assert until(lambda: not any(map(is_running, written(tmp_path))))


@pytest.mark.parametrize("function", [lambda rank: rank, functools.partial(answer), Answer])
def test_functions_that_another_process_cannot_find(function: Any) -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        run_ranks(1, function)


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="world_size is 0; give 1 or more"):
        run_ranks(0, answer, None)


def test_failures_are_told_in_full() -> None:
    failures = (RankFailure(0, "hung", "stack 0\n"), RankFailure(2, "died", "stack 2"))
    assert str(RanksFailed(failures, {1: None})) == (
        "rank 0 hung, rank 2 died of 3 ranks\n--- rank 0 hung\nstack 0\n--- rank 2 died\nstack 2"
    )
