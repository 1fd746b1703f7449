"""The marker npu(n) in whole sessions, side by side: pytest-xdist workers and concurrent runs."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from afd_testkit.device_pool import EMULATED, VISIBLE

pytestmark = pytest.mark.cpu

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")

#: Two devices that a hook names, so that outcomes are the same on any host.
CONFTEST = """
    def pytest_afd_npu_devices():
        from afd_testkit.device_pool import Device
        return [Device(4, 4), Device(5, 5)]
"""
#: Each test writes when it has which devices, on the clock that all processes share.
LOGGING = """
    import os, time
    from pathlib import Path
    import pytest

    HERE = Path(__file__).parent

    def log(devices):
        start = time.monotonic_ns()
        time.sleep(0.15)
        line = f"{os.getpid()} {devices} {start} {time.monotonic_ns()}\\n"
        with open(HERE / "log.txt", "a") as out:
            out.write(line)

    @pytest.fixture(scope="session", autouse=True)
    def all_are_here():
        (HERE / f"here.{os.getpid()}").touch()
        end = time.monotonic() + 60
        while len(list(HERE.glob("here.*"))) < PROCESSES:
            assert time.monotonic() < end, "the others did not come"
            time.sleep(0.01)

    @pytest.mark.npu(1)
    @pytest.mark.parametrize("n", range(4))
    def test_one(npu_lease, n):
        assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == npu_lease.visible
        log(npu_lease.visible)

    @pytest.mark.npu(2)
    @pytest.mark.parametrize("n", range(2))
    def test_both(n):
        assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == "4,5"
        log("4,5")
"""


@pytest.fixture(autouse=True)
def _own_devices(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (EMULATED, VISIBLE):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(CONFTEST)


def leasing(pytester: pytest.Pytester, *more: str) -> list[str]:
    return [*QUIET, "--afd-npu-locks", str(pytester.path / "locks"), *more]


def overlaps(log: Path) -> tuple[int, int, list[str]]:
    """Uses of single devices in ``log``, processes in it, and uses of a device at one time."""
    uses: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    pids = set()
    for line in log.read_text().splitlines():
        pid, devices, start, end = line.split()
        pids.add(pid)
        for device in devices.split(","):
            uses[device].append((int(start), int(end)))
    assert set(uses) == {"4", "5"}
    wrong = []
    for device, times in uses.items():
        times.sort()
        for (start, end), (later, _) in pairwise(times):
            if later < end:
                wrong.append(f"{device}: {start}-{end} and from {later}")
    return sum(map(len, uses.values())), len(pids), wrong


def test_concurrent_runs_never_share_a_device(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_inner=LOGGING.replace("PROCESSES", "2"))
    command = [*pytester._getpytestargs(), *leasing(pytester)]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    for run in runs:
        shown, _ = run.communicate(timeout=120)
        assert run.returncode == 0, shown
        assert "6 passed" in shown
    # each run: four tests with one device and two with two
    assert overlaps(pytester.path / "log.txt") == (2 * (4 + 2 * 2), 2, [])


def test_workers_never_share_a_device(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_inner=LOGGING.replace("PROCESSES", "2"))
    result = pytester.runpytest_subprocess(*leasing(pytester, "-n", "2"))
    result.assert_outcomes(passed=6)
    assert overlaps(pytester.path / "log.txt") == (4 + 2 * 2, 2, [])


HOLD = """
import sys, time
from pathlib import Path
from afd_testkit.device_pool import Device
from afd_testkit.leases import NpuPool
with NpuPool((Device(4, 4), Device(5, 5)), Path(sys.argv[1])).lease(2, "another run"):
    print("holds", flush=True)
    time.sleep(600)
"""
PLAIN = "import pytest\n@pytest.mark.npu\ndef test_it(): pass"


@pytest.fixture
def holder(pytester: pytest.Pytester) -> Iterator[subprocess.Popen[str]]:
    """Another process that has both devices until it is killed."""
    command = [sys.executable, "-c", HOLD, str(pytester.path / "locks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_waiting_is_seen(
    pytester: pytest.Pytester, holder: subprocess.Popen[str], workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(PLAIN)
    options = leasing(pytester, "--afd-npu-wait", "90", *workers)
    command = [*pytester._getpytestargs(), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        # The holder is ended only when the line was seen, so that it came while waiting.
        seen = next((line for line in run.stdout if "waiting for" in line), "")
        holder.kill()
        shown = run.stdout.read()
    assert run.returncode == 0, shown
    assert "1 passed" in shown
    assert "test_it needs 1 of the NPUs 4, 5: waiting for 0 of at most 90 s, 4 is held by" in seen
    assert ", another run" in seen


def test_waiting_has_an_end(pytester: pytest.Pytester, holder: subprocess.Popen[str]) -> None:
    pytester.makepyfile(PLAIN)
    result = pytester.runpytest_inprocess(*leasing(pytester, "--afd-npu-wait", "0.2"))
    assert holder.poll() is None
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["E *LeaseError: *::test_it needs 1 of the NPUs 4, 5: not free after 0.* --afd-npu-wait *"]
    )


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan"])
def test_senseless_waits_are_refused(pytester: pytest.Pytester, value: str) -> None:
    result = pytester.runpytest_inprocess(*QUIET, f"--afd-npu-wait={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--afd-npu-wait: '{value}'; give a number of seconds*"])


def test_more_than_there_are_is_a_missing_need(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PLAIN.replace("npu", "npu(3)"))
    result = pytester.runpytest_inprocess(*leasing(pytester))
    result.assert_outcomes(skipped=1)
    result.stdout.re_match_lines([r"npu +1 +3 NPU devices are needed, given 2 +pytest -m npu .*"])
    assert not (pytester.path / "locks").exists()


def test_the_caller_s_variable_comes_back(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.npu(1)
        def test_leased(): assert os.environ.pop("ASCEND_RT_VISIBLE_DEVICES") == "4"

        def test_after(): assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == "4,5,6"
        """
    )
    monkeypatch.setenv(VISIBLE, "4,5,6")
    pytester.runpytest_inprocess(*leasing(pytester)).assert_outcomes(passed=2)


def test_a_lease_needs_an_amount(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(npu_lease): pass")
    result = pytester.runpytest_inprocess(*leasing(pytester))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E *test_it uses npu_lease without*mark it with *npu(n)."])


def test_devices_come_before_other_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.fixture(autouse=True)
        def engine(): return os.environ["ASCEND_RT_VISIBLE_DEVICES"]

        @pytest.mark.npu(2)
        def test_it(engine, npu_lease): assert engine == npu_lease.visible == "4,5"
        """
    )
    pytester.runpytest_inprocess(*leasing(pytester)).assert_outcomes(passed=1)


def test_unmarked_tests_touch_no_lock(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest_inprocess(*leasing(pytester)).assert_outcomes(passed=1)
    assert not (pytester.path / "locks").exists()


def test_the_emulated_npu_is_not_leased(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EMULATED, "1")
    pytester.makepyfile(PLAIN)
    result = pytester.runpytest_inprocess(*leasing(pytester, "--afd-require", "npu"))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*needs npu(1): the NPU of this process is emulated, *"])
    assert not (pytester.path / "locks").exists()


def test_the_suite_explains_itself_without_a_device(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EMULATED, "1")  # so that it is without one on any host
    suite = Path(__file__).parents[1] / "npu"
    (pytester.path / "conftest.py").unlink()
    result = pytester.runpytest_subprocess(*QUIET, "-rs", "-m", "npu", str(suite))
    counted = result.parseoutcomes()
    assert set(counted) == {"skipped"}
    assert counted["skipped"] >= 1
    result.stdout.re_match_lines_random(
        [
            r"npu +\d+ +the NPU of this process is emulated.* +pytest -m npu --afd-require npu, "
            r"on a host with torch-npu",
        ]
    )
