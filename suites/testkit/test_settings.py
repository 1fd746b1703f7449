"""Options: defaults, early refusals, one help group."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from afd_testkit.settings import Settings, check_results_dir, default_cache, parse_settings

pytestmark = pytest.mark.cpu


def parse(pytester: pytest.Pytester, *args: str) -> Settings:
    return parse_settings(pytester.parseconfig(*args))


def test_defaults(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    assert parse(pytester) == Settings(
        require=(),
        engine=None,
        models=(),
        prompts=None,
        results=pytester.path / "afd-results",
        cache=pytester.path / "cache" / "afd-testkit",
    )


def test_all_options(pytester: pytest.Pytester) -> None:
    pytester.mkdir("checkpoint")
    prompts = pytester.path / "mine.jsonl"
    prompts.write_text('{"text": "Hello"}\n')
    found = parse(
        pytester,
        *("--afd-require", "cpu", "--afd-require", "vllm", "--afd-require", "cpu"),
        *("--afd-engine", "vllm-cpu", "--afd-model", "checkpoint", "--afd-model", "qwen3-moe"),
        *("--afd-prompts", "mine.jsonl", "--afd-results", "out/a", "--afd-cache", "made"),
    )
    assert found == Settings(
        require=("cpu", "vllm"),
        engine="vllm-cpu",
        models=(str(pytester.path / "checkpoint"), "qwen3-moe"),
        prompts=prompts,
        results=pytester.path / "out" / "a",
        cache=pytester.path / "made",
    )


def test_settings_are_frozen(afd_settings: Settings) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        afd_settings.engine = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/var/cached", "/var/cached/afd-testkit"), ("", None), ("relative", None)],
)
def test_cache_follows_xdg(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, expected: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    at_home = tmp_path / ".cache" / "afd-testkit"
    assert default_cache() == (at_home if expected is None else Path(expected))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--afd-require", "gpu"], ["--afd-require gpu", "cpu, vllm, ascend, npu, accuracy, amx"]),
        (["--afd-engine", ""], ["--afd-engine is empty", "reference"]),
        (["--afd-model", "gone/away"], ["gone/away", "neither a directory nor a recipe"]),
        (["--afd-model", "gpt"], ["'gpt'", "recipes are", "qwen3-moe"]),
        (["--afd-engine", "mine", "--afd-model", "a/b"], ["'a/b'", "neither a directory"]),
        (["--afd-engine", "reference", "--afd-model", "gpt"], ["'gpt'", "recipes are"]),
        (["--afd-model", ""], ["''", "neither a directory nor a recipe"]),
        (["--afd-prompts", "gone.jsonl"], ["--afd-prompts", "gone.jsonl", "No such file"]),
        (["--afd-prompts", "bad.jsonl"], ["bad.jsonl, line 2", "not JSON"]),
        (["--afd-results", "bad.jsonl"], ["--afd-results", "bad.jsonl", "is not a folder"]),
        (["--afd-results", "bad.jsonl/x"], ["--afd-results", "bad.jsonl is not a folder"]),
        (["--afd-cache", "bad.jsonl"], ["--afd-cache", "bad.jsonl", "is not a folder"]),
    ],
)
def test_refused_before_any_test(
    pytester: pytest.Pytester, args: list[str], words: list[str]
) -> None:
    (pytester.path / "bad.jsonl").write_text('{"text": "Hello"}\n{"text":\n')
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "no:hypothesispytest", *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    output = result.stderr.str()
    for word in words:
        assert word in output
    assert "passed" not in result.stdout.str()


def test_a_foreign_engine_may_name_its_own_models(pytester: pytest.Pytester) -> None:
    assert parse(pytester, "--afd-engine", "mine", "--afd-model", "gpt").models == ("gpt",)


def test_results_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_results_dir(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_results_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pytest.UsageError, match=r"--afd-results: .*file/sub.*not a folder"):
        check_results_dir(tmp_path / "file" / "sub")


def test_one_help_group_lists_every_option(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_inprocess("-p", "no:hypothesispytest", "--help").stdout.str()
    group = re.search(r"^attention-FFN .*:\n((?:  .*\n)+)", text, re.MULTILINE)
    assert group is not None
    options = {"require", "engine", "model", "prompts", "results", "cache"}
    options |= {"npu-wait", "npu-locks", "npu-streams", "gsm8k", "questions"}
    options |= {"server", "baseline-server", "baseline", "server-model", "server-dtype"}
    assert set(re.findall(r"--afd-([\w-]+)", group[1])) == options
    assert set(re.findall(r"--afd-([\w-]+)", text)) == options
