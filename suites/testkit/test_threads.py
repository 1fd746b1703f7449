"""What workers must heed: a part of the cores each, and no time measured beside others."""

from __future__ import annotations

import os

import pytest

from afd_testkit.workers import THREADS, bound_threads, threads_of

pytestmark = pytest.mark.cpu

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")


@pytest.mark.parametrize(
    ("workers", "cores", "threads"), [(2, 2, 1), (2, 64, 32), (3, 64, 21), (8, 2, 1), (1, 4, 4)]
)
def test_a_worker_has_its_part_of_the_cores(workers: int, cores: int, threads: int) -> None:
    assert threads_of(workers, cores) == threads
    assert threads * workers <= max(cores, workers)


def test_one_worker_is_not_bound() -> None:
    environment: dict[str, str] = {}
    assert bound_threads(1, 8, environment) is None
    assert environment == {}


@pytest.mark.parametrize("before", ["", None])
def test_several_are(before: str | None) -> None:
    import torch

    threads = torch.get_num_threads()
    environment = {} if before is None else {THREADS: before}
    try:
        assert bound_threads(4, 12, environment) == 3
        assert environment == {THREADS: "3"}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_the_caller_s_number_stands() -> None:
    environment = {THREADS: "5"}
    assert bound_threads(4, 12, environment) is None
    assert environment == {THREADS: "5"}


SHOWING = """
    import os
    import pytest

    @pytest.mark.parametrize("n", range(2))
    def test_it(n):
        import torch
        print("threads", torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
        assert False
"""
CORES = len(os.sched_getaffinity(0))
PART = max(1, CORES // 2)


@pytest.mark.parametrize(
    ("options", "given", "shown"),
    [
        (("-n", "2"), None, f"threads {PART} {PART}"),
        (("-n", "2"), str(CORES), f"threads {CORES} {CORES}"),
        (("-n", "0"), None, "threads [0-9]* None"),
    ],
    ids=["bound", "given", "alone"],
)
def test_threads_of_a_session(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    given: str | None,
    shown: str,
) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    if given is not None:
        monkeypatch.setenv(THREADS, given)
    pytester.makepyfile(SHOWING)
    result = pytester.runpytest_subprocess(*QUIET, *options)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([shown, shown])


TIMING = """
    import pytest

    @pytest.mark.afd_timing
    def test_time(): pass

    @pytest.mark.afd_timing
    def test_other_time(): pass

    def test_plain(): pass
"""


@pytest.mark.parametrize("options", [(), ("-n", "0"), ("-n", "1")], ids=" ".join)
def test_time_may_be_measured_alone(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    pytester.makepyfile(TIMING)
    pytester.runpytest_subprocess(*QUIET, *options).assert_outcomes(passed=3)


def test_time_is_not_measured_beside_others(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TIMING)
    result = pytester.runpytest_subprocess(*QUIET, "-n", "2")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "*::test_time measures time (marker afd_timing), and 2 pytest-xdist workers run here*"
            "pytest -n 0 -m afd_timing.*",
            "*::test_other_time measures time*",
        ]
    )
    left_out = pytester.runpytest_subprocess(*QUIET, "-n", "2", "-m", "not afd_timing")
    left_out.assert_outcomes(passed=1)


def test_the_marker_is_documented(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*QUIET, "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.afd_timing: measures time; refused where several *"])
