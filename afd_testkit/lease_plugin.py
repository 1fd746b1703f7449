"""Leases in a session: the marker ``npu(n)`` takes n devices for the time of its test."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from afd_testkit.device_pool import find_devices
from afd_testkit.devices import BUILT_IN, Needs
from afd_testkit.leases import DEFAULT_LOCKS, DEFAULT_WAIT, Lease, LeaseError, NpuPool

_FIXTURE = "npu_lease"


def add_options(group: pytest.OptionGroup) -> None:
    """How long to wait for devices, and where their locks are."""
    group.addoption(
        "--afd-npu-wait",
        metavar="SECONDS",
        type=_seconds,
        default=DEFAULT_WAIT,
        help="fail a test whose NPUs others hold for longer than SECONDS "
        f"(default: {DEFAULT_WAIT:g}; 0 does not wait)",
    )
    group.addoption(
        "--afd-npu-locks",
        metavar="DIR",
        default=str(DEFAULT_LOCKS),
        help="folder of the NPUs' locks, the same one for all who share the devices, also from "
        f"containers (default: {DEFAULT_LOCKS})",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; give a number of seconds, 0 or more")
    return seconds


def pytest_itemcollected(item: pytest.Item) -> None:
    """A marked test gets its devices before any other fixture, whether it asks for them or not."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("npu") is not None:
        names = item.fixturenames
        item.fixturenames[:] = [_FIXTURE, *(name for name in names if name != _FIXTURE)]


@pytest.fixture(scope="session")
def npu_pool(pytestconfig: pytest.Config) -> NpuPool:
    """The devices that this run may use, and the locks that it shares with other runs."""
    given = pytestconfig.hook.pytest_afd_npu_devices()
    return NpuPool(
        devices=find_devices() if given is None else tuple(given),
        locks=pytestconfig.invocation_params.dir / pytestconfig.getoption("--afd-npu-locks"),
        wait=pytestconfig.getoption("--afd-npu-wait"),
    )


@pytest.fixture
def npu_lease(request: pytest.FixtureRequest, npu_pool: NpuPool) -> Iterator[Lease]:
    """The n devices of a test marked ``npu(n)``, its own on this host until it ends.

    Children that the test starts see just these.  A process whose runtime is already up keeps the
    devices that it saw then: use leased devices in children.
    """
    node = request.node
    amounts = [d.amount for d in Needs(BUILT_IN).demands(node) if d.need.name == "npu"]
    if not amounts:
        raise LeaseError(
            f"{node.nodeid} uses {_FIXTURE} without saying how many devices it needs; mark it "
            "with @pytest.mark.npu(n)."
        )
    with (
        npu_pool.lease(amounts[0], node.nodeid, _teller(request.config)) as lease,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in lease.environment.items():
            patch.setenv(name, value)
        yield lease


def _teller(config: pytest.Config) -> Callable[[str], None]:
    """Write a line past capturing: to the terminal, in a worker to the error stream it shares."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            if reporter is None or hasattr(config, "workerinput"):
                # A worker's reporter, if it has one, writes to nowhere.  One write, so that lines
                # of several workers do not mix.
                os.write(2, f"{line}\n".encode())
            else:
                reporter.ensure_newline()
                reporter.write(f"{line}\n", flush=True)

    return tell
