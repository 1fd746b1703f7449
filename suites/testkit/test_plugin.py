"""The plugin in whole sessions: cheap to load, honest in its header, visible while it works."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")

HEAVY = ("torch", "vllm", "numpy", "hypothesis", "rich", "jsonschema", "jinja2", "transformers")


def test_a_session_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    """Header, skip rule, leak guard and closing table included; other plugins are kept out."""
    pytester.makepyfile(
        test_light="""
        import pytest
        def test_runs(): pass
        @pytest.mark.npu(64)
        def test_cannot(): pass
        """,
        run=f"""
        import sys
        import pytest
        flags = ["-p", "no:randomly", "-p", "no:hypothesispytest", "-p", "no:xdist"]
        code = pytest.main([*flags, "test_light.py"])
        assert code == 0, code
        assert "afd_testkit.plugin" in sys.modules
        print("loaded:", sorted({HEAVY!r} & sys.modules.keys()))
        """.replace(repr(HEAVY), repr(set(HEAVY))),
    )
    result = pytester.runpython("run.py")
    result.stdout.fnmatch_lines(["*1 passed, 1 skipped*", r"loaded: [[][]]"])


def test_header_says_what_is_in_force(pytester: pytest.Pytester) -> None:
    import torch

    pytester.makeconftest(
        """
        from afd_testkit.devices import Need
        def pytest_afd_needs():
            return [Need("moon", "m", "c", lambda n: "far"), Need("air", "a", "c", lambda n: None)]
        """
    )
    result = pytester.runpytest_inprocess(
        *QUIET, "--afd-engine", "mine", "--afd-require", "cpu", "--afd-require", "air"
    )
    result.stdout.re_match_lines(
        [
            r"afd: has cpu, .*air; lacks .*moon; required: cpu, air; engine: mine",
            rf"afd: torch {torch.__version__}".replace("+", r"\+"),
        ]
    )


def test_header_without_options(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*QUIET)
    result.stdout.fnmatch_lines(["afd: has cpu*; required: none; engine: chosen by each gate"])


PROGRESS = """
    def test_it(afd_progress):
        print("captured")
        afd_progress("working on it")
"""


@pytest.mark.parametrize("capture", ["fd", "sys", "no"])
def test_progress_is_seen_through_capturing(pytester: pytest.Pytester, capture: str) -> None:
    pytester.makepyfile(PROGRESS)
    result = pytester.runpytest_subprocess(*QUIET, f"--capture={capture}")
    result.assert_outcomes(passed=1)
    assert result.outlines.count("working on it") == 1
    assert ("captured" in result.stdout.str()) is (capture == "no")


def test_progress_in_a_worker_is_harmless(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PROGRESS)
    pytester.runpytest_subprocess(*QUIET, "-n", "1").assert_outcomes(passed=1)


ENGINES = """
    class Mine:
        name = "mine"
        def __init__(self, config): self.config = config
        def close(self): print("closed", self.config.model)

    def pytest_afd_engine_names():
        return ["mine"]

    def pytest_afd_engine(config, settings):
        return Mine(config) if settings.engine == "mine" else None
"""


def test_a_hook_serves_an_engine(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(ENGINES)
    pytester.makepyfile(
        """
        from afd_testkit.engines.base import EngineConfig

        def test_first(afd_engines):
            config = EngineConfig("small")
            engine = afd_engines.get(config)
            assert (engine.name, engine.config) == ("mine", config)
            assert afd_engines.get(EngineConfig("small")) is engine
        """
    )
    result = pytester.runpytest_inprocess(*QUIET, "-s", "--afd-engine", "mine")
    result.assert_outcomes(passed=1)
    assert result.stdout.str().count("closed small") == 1


def test_an_unknown_engine_is_an_error_with_the_known_names(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(ENGINES)
    pytester.makepyfile(
        """
        from afd_testkit.engines.base import EngineConfig
        def test_it(afd_engines): afd_engines.get(EngineConfig("small"))
        """
    )
    result = pytester.runpytest_inprocess(*QUIET, "--afd-engine", "theirs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *no plugin starts an engine named 'theirs'; known names are ascend, mine, "
            "reference, vllm-cpu."
        ]
    )


def test_a_shipped_engine_can_be_replaced(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(ENGINES.replace('== "mine"', '== "reference"'))
    pytester.makepyfile(
        """
        from afd_testkit.engines.base import EngineConfig
        def test_it(afd_engines):
            assert afd_engines.get(EngineConfig("small"), "reference").name == "mine"
        """
    )
    pytester.runpytest_inprocess(*QUIET).assert_outcomes(passed=1)


def test_starting_an_engine_is_no_leak_of_the_test(pytester: pytest.Pytester) -> None:
    changed = ENGINES.replace(
        "self.config = config", 'import os; os.environ["AFD_ENGINE"] = "on"; self.config = config'
    )
    pytester.makeconftest(
        changed.replace("print(", 'import os; del os.environ["AFD_ENGINE"]; print(')
    )
    pytester.makepyfile(
        """
        import os
        from afd_testkit.engines.base import EngineConfig
        def test_first(afd_engines): afd_engines.get(EngineConfig("small"))
        def test_second(): assert os.environ["AFD_ENGINE"] == "on"
        """
    )
    pytester.runpytest_inprocess(*QUIET, "--afd-engine", "mine").assert_outcomes(passed=2)


def test_hooks_are_checked_by_name(pytester: pytest.Pytester) -> None:
    """A misspelt extension is refused by pluggy, since the hooks are declared."""
    pytester.makeconftest("def pytest_afd_needz(): return []")
    result = pytester.runpytest_inprocess(*QUIET)
    assert result.ret != pytest.ExitCode.OK
    assert "pytest_afd_needz" in result.stderr.str() + result.stdout.str()
