"""What pytest-xdist's workers must heed: each has a part of the cores, and none may measure time.

OpenMP and torch start a thread for every core they see; with several workers doing so the cores
are shared by too many, and all of them wait for each other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

import pytest

#: Read by OpenMP, MKL, OpenBLAS and torch when they are loaded, and inherited by children.
THREADS = "OMP_NUM_THREADS"
TIMING_MARKER = "afd_timing: measures time; refused where several pytest-xdist workers run"


def worker_count(config: pytest.Config) -> int:
    """The number of workers in whose company this process runs tests; 1 without pytest-xdist."""
    return int(config.workerinput["workercount"]) if hasattr(config, "workerinput") else 1


def threads_of(workers: int, cores: int) -> int:
    """Threads that each of so many workers may use."""
    return max(1, cores // workers)


def bound_threads(
    workers: int, cores: int | None = None, environment: MutableMapping[str, str] = os.environ
) -> int | None:
    """Bound the threads of this process and its children to its part of the cores.

    ``cores``: by default those that this process may run on.  ``None`` comes back, and nothing
    happens, for one worker, and where the caller has set ``OMP_NUM_THREADS``.
    """
    if workers < 2 or environment.get(THREADS, ""):
        return None
    threads = threads_of(workers, len(os.sched_getaffinity(0)) if cores is None else cores)
    environment[THREADS] = str(threads)
    if "torch" in sys.modules:  # by somebody's early plugin; too late for the variable
        sys.modules["torch"].set_num_threads(threads)
    return threads


class TimingRule:
    """Refuses tests that measure time where other workers run beside them."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A figure taken beside other tests is wrong, so that it is not taken."""
        if self._workers > 1 and item.get_closest_marker("afd_timing") is not None:
            pytest.fail(
                f"{item.nodeid} measures time (marker afd_timing), and {self._workers} "
                "pytest-xdist workers run here, whose tests would be in its figures; run it "
                "alone: pytest -n 0 -m afd_timing. Leave it out here with -m 'not afd_timing'.",
                pytrace=False,
            )
