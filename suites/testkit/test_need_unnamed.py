"""Skips that name no need: counted in a row of their own, or red; never silent.

A need's own skips and expected failures are left alone.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-rs")
STRICT = "[pytest]\nafd_strict_needs = true"

#: A need that no host meets and two that every host meets.
CONFTEST = """
    from afd_testkit.devices import Need

    def pytest_afd_needs():
        return [
            Need("moon", "needs the moon", "fly there", lambda n: "the moon is far"),
            Need("air", "needs air", "breathe", lambda n: None),
            Need("sky", "needs the sky", "look up", lambda n: None),
        ]
"""
PASSING = "import pytest\n@pytest.mark.air\ndef test_fine(): pass"
#: The public case: wrong if it ever runs, marked, and hidden behind its own import.
BEHIND_AN_IMPORT = """
    import pytest
    moonlight = pytest.importorskip("moonlight")
    pytestmark = pytest.mark.moon

    def test_wrong():
        assert 1 == 2
"""
SKIPS = {
    "call": "def test_it(): pytest.skip('no luck')",
    "import in the test": "def test_it(): pytest.importorskip('moonlight', reason='no luck')",
    "fixture": "@pytest.fixture\ndef f(): pytest.skip('no luck')\ndef test_it(f): pass",
    "mark": "@pytest.mark.skip(reason='no luck')\ndef test_it(): pass",
    "condition": "@pytest.mark.skipif(True, reason='no luck')\ndef test_it(): pass",
    "unittest": (
        "import unittest\nclass TestIt(unittest.TestCase):\n"
        "    def test_it(self): self.skipTest('no luck')"
    ),
    "waived": "@pytest.mark.xfail\ndef test_it(): pytest.skip('no luck')",
}
#: Which phase reports it: a skip in a fixture or by a mark is one of the setup.
IN_SETUP = {"fixture", "mark", "condition"}

WAYS = [
    pytest.param(STRICT, (), "afd_strict_needs", id="strict"),
    pytest.param("[pytest]", ("--afd-require", "sky"), "--afd-require sky", id="required"),
]
WORKERS = [pytest.param((), id="alone"), pytest.param(("-n", "2"), id="workers")]


@pytest.fixture(autouse=True)
def _conftest(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    start = pytester.runpytest_subprocess if "-n" in options else pytester.runpytest_inprocess
    return start(*QUIET, *options)


def skipping(text: str) -> str:
    return f"import pytest\npytestmark = pytest.mark.air\n{text}"


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("ini", "options", "held"), WAYS)
def test_a_module_behind_its_import_is_red(
    pytester: pytest.Pytester,
    ini: str,
    options: tuple[str, ...],
    held: str,
    workers: tuple[str, ...],
) -> None:
    pytester.makeini(ini)
    pytester.makepyfile(test_hidden=BEHIND_AN_IMPORT, test_fine=PASSING)
    result = run(pytester, *options, *workers)
    assert result.ret not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    # pytest-xdist runs the rest all the same
    result.assert_outcomes(errors=1, passed=len(workers) // 2)
    result.stdout.fnmatch_lines(
        [
            f"*test_hidden.py: skipped at *test_hidden.py:2 (could not import 'moonlight'*"
            f"under {held} only a need may skip. Take the skip out, mark *(cpu, *moon, air, sky)*"
        ]
    )


@pytest.mark.parametrize("workers", WORKERS)
def test_elsewhere_it_is_counted(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(test_hidden=BEHIND_AN_IMPORT, test_fine=PASSING)
    result = run(pytester, *workers)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.re_match_lines(
        [
            ".*afd: not run here.*",
            r"need +tests +why +to run them",
            r"no need named +1 +skipped all the same: 1 whole, .* +pytest -rs shows where and why",
        ]
    )


@pytest.mark.parametrize(("ini", "options", "held"), WAYS)
@pytest.mark.parametrize("name", SKIPS)
def test_a_skipping_test_is_red(
    pytester: pytest.Pytester, name: str, ini: str, options: tuple[str, ...], held: str
) -> None:
    pytester.makeini(ini)
    pytester.makepyfile(test_inner=skipping(SKIPS[name]), test_fine=PASSING)
    result = run(pytester, *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, **{"errors" if name in IN_SETUP else "failed": 1})
    result.stdout.fnmatch_lines(
        [f"test_inner.py::*test_it: skipped at *test_inner.py:* (no luck) *under {held} only*"]
    )
    result.stdout.no_fnmatch_line("*no need named*")


@pytest.mark.parametrize("name", SKIPS)
def test_a_skipping_test_of_others_is_counted_and_green(
    pytester: pytest.Pytester, name: str
) -> None:
    pytester.makepyfile(test_inner=skipping(SKIPS[name]), test_fine=PASSING)
    result = run(pytester)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.re_match_lines(
        [r"no need named +1 +skipped all the same: 1 by a mark or a call +pytest -rs shows .*"]
    )


def test_a_skip_in_a_teardown_is_red(pytester: pytest.Pytester) -> None:
    pytester.makeini(STRICT)
    fixture = "@pytest.fixture\ndef f():\n    yield\n    pytest.skip('no luck')\n"
    pytester.makepyfile(skipping(f"{fixture}def test_it(f): pass"))
    run(pytester).assert_outcomes(passed=1, errors=1)


@pytest.mark.parametrize("workers", WORKERS)
def test_tests_and_modules_are_counted_together(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    # Two modules that fail in one place, in a helper: pytest-xdist passes only one report on.
    pytester.makepyfile(
        helper="import pytest\npytest.skip('not today', allow_module_level=True)",
        test_a="import helper",
        test_b="import helper",
        test_c=skipping(
            "@pytest.mark.skip\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): pass"
        ),
        test_moon="import pytest\n@pytest.mark.moon\ndef test_far(): assert 0",
    )
    pytester.makeini("[pytest]\npythonpath = .")
    result = run(pytester, *workers)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.re_match_lines(
        [
            r"moon +1 +the moon is far +fly there",
            r"no need named +5 +skipped all the same: 3 by a mark or a call, 2 whole, .*",
        ]
    )


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("ini", "options", "held"), WAYS)
def test_skips_of_a_need_and_expected_failures_stay(
    pytester: pytest.Pytester,
    ini: str,
    options: tuple[str, ...],
    held: str,
    workers: tuple[str, ...],
) -> None:
    pytester.makeini(ini)
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.air

        @pytest.mark.moon
        def test_far(): assert 0

        @pytest.mark.moon
        @pytest.mark.skip(reason="both")
        def test_far_and_skipped(): assert 0

        @pytest.mark.xfail
        def test_expected(): assert 0

        @pytest.mark.xfail(run=False)
        def test_not_run(): assert 0

        def test_called(): pytest.xfail("known")

        @pytest.mark.skipif(False, reason="never")
        def test_fine(): pass
        """
    )
    result = run(pytester, *options, *workers)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(skipped=2, xfailed=3, passed=1)
    result.stdout.re_match_lines([r"moon +2 +the moon is far +fly there"])
    result.stdout.no_fnmatch_line("*no need named*")


def test_a_skip_and_a_leak_of_one_module_are_both_told(pytester: pytest.Pytester) -> None:
    pytester.makeini(STRICT)
    pytester.makepyfile(
        test_hidden="import os, pytest\nos.environ['AFD_LEAK'] = '1'\n"
        "pytest.skip('no luck', allow_module_level=True)"
    )
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*test_hidden.py: skipped at *(no luck)*", "test_hidden.py left the process changed:"]
    )
