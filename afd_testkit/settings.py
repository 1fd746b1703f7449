"""Command-line options, parsed once into one frozen object and checked before any test runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from afd_testkit.accuracy.options import (
    ServerOptions,
    add_server_options,
    parse_server_options,
)

GROUP = "afd"
DEFAULT_RESULTS = "afd-results"
HUB = "hub"  # instead of a file of questions
BUILT_IN_ENGINES = ("reference", "vllm-cpu", "ascend")


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line.

    ``require``: names of needs whose absence is a failure instead of a skip.
    ``engine``: the engine to judge; ``None`` leaves the choice to each gate.
    ``models``: checkpoint directories (absolute) or names of built-in recipes.
    ``prompts``: the user's own prompts (absolute path), already checked line by line.
    ``npu_streams``: ``check`` has engines on the emulated NPU check the order of accesses.
    ``gsm8k``: file of questions for the accuracy gate (absolute) or ``hub``; ``None`` for the
    built-in ones.
    ``questions``: how many of them are asked; ``None`` for all.
    ``servers``: running servers for the accuracy gate, ``None`` for an engine in process.
    ``results``: folder for the record and the page.  ``cache``: folder for made models.
    """

    require: tuple[str, ...]
    engine: str | None
    models: tuple[str, ...]
    prompts: Path | None
    results: Path
    cache: Path
    npu_streams: str = "off"
    gsm8k: str | None = None
    questions: int | None = None
    servers: ServerOptions | None = None


def add_options(parser: pytest.Parser) -> None:
    """Register every option, and the ini settings, under one ``--help`` group."""
    group = parser.getgroup(GROUP, "attention-FFN disaggregation: gates and needs")
    group.addoption(
        "--afd-require",
        action="append",
        default=[],
        metavar="NEED",
        help="fail, instead of skip, tests whose need NEED is missing (repeatable)",
    )
    group.addoption(
        "--afd-engine",
        metavar="NAME",
        help="engine to judge: reference, vllm-cpu, ascend, or one that a hook provides "
        "(default: chosen by each gate)",
    )
    group.addoption(
        "--afd-model",
        action="append",
        default=[],
        metavar="DIR|RECIPE",
        help="checkpoint directory or built-in recipe to judge (repeatable; "
        "default: chosen by each gate)",
    )
    group.addoption(
        "--afd-prompts",
        metavar="FILE.jsonl",
        help="your own prompts, one JSON object a line with text or token_ids",
    )
    group.addoption(
        "--afd-gsm8k",
        metavar="FILE.jsonl|hub",
        help="questions for the accuracy gate, in GSM8K's layout, or hub for the public ones "
        "(default: the built-in ones)",
    )
    group.addoption(
        "--afd-questions",
        type=int,
        metavar="N",
        help="ask only the first N questions in the accuracy gate (default: all)",
    )
    add_server_options(group)
    group.addoption(
        "--afd-results",
        metavar="DIR",
        default=DEFAULT_RESULTS,
        help=f"folder for the JSON record and the HTML page (default: {DEFAULT_RESULTS})",
    )
    group.addoption(
        "--afd-cache",
        metavar="DIR",
        help="folder for made models (default: afd-testkit in the user's cache folder)",
    )
    group.addoption(
        "--afd-npu-streams",
        choices=("off", "check"),
        default="off",
        help="check: engines on the emulated NPU report accesses that no event, wait or "
        "synchronize orders, with both call sites (slower; default: off)",
    )
    parser.addini("afd_strict_needs", "every test must name a need", type="bool", default=False)
    parser.addini(
        "afd_ledger",
        "TOML file of waived tests and checks, relative to the root folder; "
        "once set, xfail marks need an entry in it",
        default="",
    )


def parse_settings(config: pytest.Config) -> Settings:
    """The options of ``config``; :class:`pytest.UsageError` for one that cannot be used."""
    base = config.invocation_params.dir
    cache: str | None = config.getoption("--afd-cache")
    prompts: str | None = config.getoption("--afd-prompts")
    engine: str | None = config.getoption("--afd-engine")
    if engine is not None and not engine.strip():
        raise pytest.UsageError("--afd-engine is empty; give a name such as reference or vllm-cpu.")
    gsm8k, questions = _to_ask(
        base, config.getoption("--afd-gsm8k"), config.getoption("--afd-questions")
    )
    return Settings(
        require=tuple(dict.fromkeys(config.getoption("--afd-require"))),
        engine=engine,
        models=tuple(_model(base, given, engine) for given in config.getoption("--afd-model")),
        prompts=None if prompts is None else _prompts(base / prompts),
        results=_folder("--afd-results", base / config.getoption("--afd-results")),
        cache=_folder("--afd-cache", default_cache() if cache is None else base / cache),
        npu_streams=config.getoption("--afd-npu-streams"),
        gsm8k=gsm8k,
        servers=parse_server_options(config),
        questions=questions,
    )


def default_cache() -> Path:
    """``afd-testkit`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule: a relative path in the variable is to be ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "afd-testkit"


def check_results_dir(path: Path) -> None:
    """Make the folder and prove that a file can be written there, leaving none behind.

    Raises :class:`pytest.UsageError`, so that an hour of gates is not run for nothing.
    """
    # Imported here: only a run with gates writes results.
    from afd_testkit.results_folder import ResultsFolderError, check_writable

    try:
        check_writable(path)
    except ResultsFolderError as error:
        raise pytest.UsageError(f"--afd-results: {error}") from error


def _folder(option: str, path: Path) -> Path:
    """``path``, unless something that is no folder stands at it or above it."""
    for place in (path, *path.parents):
        if place.is_dir():
            break
        if place.exists():
            raise pytest.UsageError(f"{option} {path}: {place} is not a folder; name a folder.")
    return path


def _model(base: Path, given: str, engine: str | None) -> str:
    """The absolute path of an existing directory, or a recipe's name as it is."""
    if given and os.path.isdir(base / given):
        return str(base / given)
    known = _recipes(engine)
    if known is None and given and os.sep not in given:
        return given
    if known is not None and given in known:
        return given
    names = "the engine's own" if known is None else ", ".join(known)
    raise pytest.UsageError(
        f"--afd-model {given!r} is neither a directory nor a recipe; recipes are {names}."
    )


def _recipes(engine: str | None) -> list[str] | None:
    """The recipes of a shipped engine, ``None`` for someone else's, which may know any."""
    # Imported here: only a run that names a model pays for the recipes.
    if engine == "reference":
        from afd_testkit.engines.reference import RECIPES as REFERENCE

        return sorted(REFERENCE)
    if engine in (None, *BUILT_IN_ENGINES):
        from afd_testkit.models.recipes import RECIPES

        return sorted(RECIPES)
    return None


def _prompts(path: Path) -> Path:
    from afd_testkit.prompts import PromptFileError, load_prompts

    try:
        load_prompts(path)
    except PromptFileError as error:
        raise pytest.UsageError(f"--afd-prompts: {error}") from error
    return path


def _to_ask(base: Path, gsm8k: str | None, questions: int | None) -> tuple[str | None, int | None]:
    """``--afd-gsm8k`` and ``--afd-questions``; how many the hub has is not known here."""
    value = _count("--afd-questions", questions)
    if gsm8k == HUB:
        return gsm8k, value
    if gsm8k is not None:
        from afd_testkit.accuracy.questions import QuestionsError, read_questions
        from afd_testkit.accuracy.task import MAX_SHOTS

        gsm8k = str(base / gsm8k)
        try:
            there = len(read_questions(Path(gsm8k))) - MAX_SHOTS  # the first are examples
        except QuestionsError as error:
            raise pytest.UsageError(f"--afd-gsm8k: {error}") from error
    elif value is None:
        return None, None
    else:
        from afd_testkit.accuracy.plan import GATE_QUESTIONS

        there = GATE_QUESTIONS
    if value is not None and value > there:
        raise pytest.UsageError(
            f"--afd-questions is {value}, and there are {max(there, 0)} to ask; give as many or "
            "fewer."
        )
    return gsm8k, value


def _count(option: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise pytest.UsageError(f"{option} is {value}; ask for 1 or more.")
    return value
