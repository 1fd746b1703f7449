"""The points at which another plugin, or a ``conftest.py``, extends this one.

Implement any of these functions under its own name.  Serving an engine of one's own takes the
first two::

    def pytest_afd_engine_names():
        return ["mine"]

    def pytest_afd_engine(config, settings):
        return MyEngine(config) if settings.engine == "mine" else None
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from afd_testkit.device_pool import Device
    from afd_testkit.devices import Need
    from afd_testkit.engines.base import EngineConfig, PrefillEngine
    from afd_testkit.results import CheckResult
    from afd_testkit.settings import Settings


@pytest.hookspec(firstresult=True)
def pytest_afd_engine(config: EngineConfig, settings: Settings) -> PrefillEngine | None:
    """Start an engine for ``config``, or ``None`` to leave it to others.

    ``settings.engine`` is the name of the engine that is wanted, never ``None`` here.  The
    caller closes what is returned.  Raise ``EngineError`` when the engine cannot start.
    """


@pytest.hookspec
def pytest_afd_engine_names() -> Sequence[str]:  # type: ignore[empty-body]
    """Names for which this plugin's :func:`pytest_afd_engine` starts an engine.

    Shown when a name is unknown.
    """


@pytest.hookspec
def pytest_afd_needs() -> Sequence[Need]:  # type: ignore[empty-body]
    """Needs to add: each becomes a marker, a row of the skip table, an ``--afd-require`` value."""


@pytest.hookspec(firstresult=True)
def pytest_afd_npu_devices() -> Sequence[Device] | None:
    """The real NPUs that ``npu(n)`` leases, or ``None`` to leave it to others.

    For hosts where they cannot be found as ``device_pool`` finds them.
    """


@pytest.hookspec
def pytest_afd_check(result: CheckResult) -> None:
    """A gate's check is finished.

    Called in the process that talks to the user, also when the check ran in a worker.
    """
