"""Values of options that pytest takes for places of tests, and so for where its settings are."""

from __future__ import annotations

from pathlib import Path

import pytest

from afd_testkit.own_ini import check_own_ini

pytestmark = pytest.mark.cpu


@pytest.fixture
def elsewhere(pytester: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the project in which pytest is started."""
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\n")
    return tmp_path_factory.mktemp("elsewhere")


@pytest.mark.parametrize("option", ["--afd-model", "--afd-gsm8k", "--afd-results"])
def test_a_value_apart_that_leads_elsewhere_is_refused(
    pytester: pytest.Pytester, elsewhere: Path, option: str
) -> None:
    config = pytester.parseconfig(option, str(elsewhere))
    assert config.inipath is None, "pytest itself finds its file now; remove the check"
    with pytest.raises(pytest.UsageError) as error:
        check_own_ini(config)
    assert f"write {option}=VALUE, or add -c {pytester.path / 'pyproject.toml'}" in str(error.value)


def test_another_project_s_settings_are_refused(pytester: pytest.Pytester, elsewhere: Path) -> None:
    (elsewhere / "pytest.ini").write_text("[pytest]\n")
    with pytest.raises(pytest.UsageError, match=r"elsewhere\d*/pytest\.ini for its settings"):
        check_own_ini(pytester.parseconfig("--afd-model", str(elsewhere)))


def test_what_pytest_reads_as_meant_is_let_be(pytester: pytest.Pytester, elsewhere: Path) -> None:
    own = pytester.mkdir("checkpoint")
    for arguments in (
        [f"--afd-model={elsewhere}"],
        ["--afd-model", "a-recipe"],
        ["--afd-model", str(own)],
        ["--afd-model", str(elsewhere), "-c", str(pytester.path / "pyproject.toml")],
        [str(elsewhere)],
        [],
    ):
        check_own_ini(pytester.parseconfig(*arguments))


def test_a_project_without_settings_has_none_to_lose(
    pytester: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_own_ini(pytester.parseconfig("--afd-model", str(tmp_path_factory.mktemp("other"))))
