"""The skip rule in whole sessions: one reason, counted, failed where required, never hidden."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-rs")

#: A need that no host meets and one that every host meets, so that outcomes are the same anywhere.
CONFTEST = """
    from afd_testkit.devices import Need

    def pytest_afd_needs():
        return [
            Need("moon", "needs the moon", "fly there", lambda n: "the moon is far", counted=True),
            Need("air", "needs air", "breathe", lambda n: None),
        ]
"""
#: Behind a missing need, wrong if it ever runs.
HIDDEN = """
    import pytest
    pytestmark = pytest.mark.moon

    def test_one():
        assert 1 == 2

    @pytest.mark.moon(3)
    def test_two():
        assert 1 == 2
"""
ROW = ["need *tests *why *to run them", "moon *2 *the moon is far *fly there"]


@pytest.fixture(autouse=True)
def _conftest(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)


def test_a_missing_need_is_counted_with_its_command(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HIDDEN)
    result = pytester.runpytest_inprocess(*QUIET)
    result.assert_outcomes(skipped=2)
    result.stdout.re_match_lines([".*afd: not run here.*", *ROW])
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED*needs moon(1): the moon is far; to run it: fly there",
            "SKIPPED*needs moon(3): the moon is far; to run it: fly there",
        ]
    )


def test_a_required_need_turns_the_same_run_red(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HIDDEN)
    result = pytester.runpytest_inprocess(*QUIET, "--afd-require", "moon")
    result.assert_outcomes(errors=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*needs moon(1): the moon is far; to run it: fly there (required*"]
    )
    result.stdout.re_match_lines([r"moon +2 +FAILED, required: the moon is far +fly there"])


def test_requiring_what_is_there_changes_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.air\ndef test_it(): pass")
    result = pytester.runpytest_inprocess(*QUIET, "--afd-require", "air")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*not run here*")


def test_a_module_that_cannot_be_imported_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest, no_such_package\npytestmark = pytest.mark.moon")
    result = pytester.runpytest_inprocess(*QUIET)
    result.assert_outcomes(errors=1)


def test_the_first_missing_need_is_the_one_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.moon
        @pytest.mark.air
        @pytest.mark.npu(64)
        def test_it(): assert 0
        """
    )
    result = pytester.runpytest_inprocess(*QUIET)
    result.assert_outcomes(skipped=1)
    result.stdout.re_match_lines([r"npu +1 +.* +pytest -m npu --afd-require npu, .*"])
    result.stdout.no_re_match_line(r"moon +1.*")


def test_deselected_tests_are_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.air
        def test_air(): pass
        @pytest.mark.moon
        def test_moon(): assert 0
        @pytest.mark.cpu
        def test_cpu(): pass
        """
    )
    result = pytester.runpytest_inprocess(*QUIET, "-m", "cpu")
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.re_match_lines_random(
        [r"air +1 +not selected here +breathe", r"moon +1 +not selected here +fly there"]
    )


def test_deselected_cpu_tests_are_the_users_choice(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\npytestmark = pytest.mark.cpu\ndef test_a(): pass\ndef test_b(): pass"
    )
    result = pytester.runpytest_inprocess(*QUIET, "-k", "test_a")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.no_fnmatch_line("*not run here*")


def test_workers_tell_the_same(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_hidden=HIDDEN)
    pytester.makepyfile(
        test_air="import pytest\n@pytest.mark.air\n@pytest.mark.parametrize('n', range(3))\n"
        "def test_air(n): pass"
    )
    result = pytester.runpytest_subprocess(*QUIET, "-n", "2", "-m", "moon")
    result.assert_outcomes(skipped=2)
    result.stdout.re_match_lines([*ROW, r"air +3 +not selected here +breathe"])


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_no_need_is_a_collection_error(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makeini("[pytest]\nafd_strict_needs = true")
    pytester.makepyfile(
        """
        import pytest
        class TestGroup:
            def test_bare(self): pass
        @pytest.mark.air
        def test_fine(): pass
        """
    )
    run = pytester.runpytest_subprocess if workers else pytester.runpytest_inprocess
    result = run(*QUIET, *workers)
    assert result.ret != pytest.ExitCode.OK
    # pytest-xdist runs the rest all the same; the session is red either way
    result.assert_outcomes(errors=1, passed=len(workers) // 2)
    result.stdout.fnmatch_lines(["*::TestGroup::test_bare: no need is named; mark *moon, air."])


def test_needs_are_free_where_not_strict(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_bare(): pass")
    pytester.runpytest_inprocess(*QUIET).assert_outcomes(passed=1)


def test_added_needs_are_markers(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*QUIET, "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.npu(n): *", "@pytest.mark.moon(n): needs the moon"])


def test_a_need_added_twice_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.replace('"air"', '"cpu"'))
    result = pytester.runpytest_inprocess(*QUIET)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'cpu' is declared twice*"])
