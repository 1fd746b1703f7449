"""What is known of a gate's test before it runs: gate, subject, case, and the command for it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from afd_testkit.devices import Need
from afd_testkit.settings import DEFAULT_RESULTS, Settings, default_cache
from afd_testkit.summary import NO_ENGINE


@dataclass(frozen=True)
class GateItem:
    """One selected test of a gate.  ``command`` runs it again, from the same directory."""

    gate: str
    engine: str
    model: str
    dtype: str
    case: str
    command: str
    topology: str = ""


def describe(item: pytest.Item, gate: str, settings: Settings) -> GateItem:
    """``item``, as its parameters name it.

    A parameter ``subject`` with the strings ``engine``, ``model`` and ``dtype`` says what is
    judged, and with a ``topology`` over which ranks; a parameter ``case`` says which case.
    Without them the test's id stands for the case.
    """
    values = _parameters(item)
    subject, case = values.get("subject"), values.get("case")
    engine, model, dtype = settings.engine or NO_ENGINE, "", ""
    named = [getattr(subject, name, None) for name in ("engine", "model", "dtype")]
    strings = [value for value in named if isinstance(value, str) and value]
    if len(strings) == len(named):
        engine, model, dtype = strings[0], Path(strings[1]).name, strings[2]
    label = getattr(getattr(subject, "topology", None), "topology_label", str)
    return GateItem(
        gate=gate,
        engine=engine,
        model=model,
        dtype=dtype,
        case=case if isinstance(case, str) and case else item.nodeid,
        command=repeat_command(item, settings),
        topology=label(),
    )


def _parameters(item: pytest.Item) -> dict[str, Any]:
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        return dict(item.callspec.params)
    return {}


def repeat_command(item: pytest.Item, settings: Settings) -> str:
    """The one command that runs ``item`` again, from the same directory."""
    config = item.config
    place, test = _place(item), item.nodeid.partition("::")[2]
    words = [*_program(), *_own_options(config), f"{place}::{test}" if test else place]
    return shlex.join([*words, *_afd_options(config, settings)])


def need_command(config: pytest.Config, settings: Settings, need: Need) -> str:
    """The command that runs, elsewhere, what this run skipped for want of ``need``.

    Ends in a shell comment that says where.
    """
    given = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    words = ["pytest", *_own_options(config), *given, "-m", need.name]
    words += [f"--afd-require={need.name}", *_afd_options(config, settings, folders=False)]
    return f"{shlex.join(words)}  # {need.command.partition(', ')[2] or need.meaning}"


def _program() -> list[str]:
    """``pytest`` where the user's shell finds this very one, else its interpreter by path."""
    found = shutil.which("pytest")
    # tox puts its environment on the PATH of what it runs, not of the user's shell.
    if found and Path(found).parent == Path(sys.executable).parent and not _under_tox():
        return ["pytest"]
    return [sys.executable, "-m", "pytest"]


def _under_tox() -> bool:
    return "TOX_ENV_NAME" in os.environ


def _own_options(config: pytest.Config) -> list[str]:
    """The options of pytest itself that decide which tests there are and what they load."""
    option = config.option
    words = []
    if option.inifilename:
        words += ["-c", str(option.inifilename)]
    if option.rootdir:
        words.append(f"--rootdir={option.rootdir}")
    for name in dict.fromkeys(["no:randomly", *(option.plugins or [])]):
        words += ["-p", str(name)]
    return [*words, "--pyargs"] if option.pyargs else words


def _afd_options(config: pytest.Config, settings: Settings, *, folders: bool = True) -> list[str]:
    """Values are joined to their options: pytest looks for its root among loose paths."""
    words = [] if settings.engine is None else [f"--afd-engine={settings.engine}"]
    words += [f"--afd-model={model}" for model in settings.models]
    if settings.npu_streams != "off":
        words.append(f"--afd-npu-streams={settings.npu_streams}")
    if settings.prompts is not None:
        words.append(f"--afd-prompts={settings.prompts}")
    if settings.gsm8k is not None:
        words.append(f"--afd-gsm8k={settings.gsm8k}")
    if settings.questions is not None:
        words.append(f"--afd-questions={settings.questions}")
    words += [] if settings.servers is None else settings.servers.words()
    if folders and settings.cache != default_cache():
        words.append(f"--afd-cache={settings.cache}")
    if folders and settings.results != config.invocation_params.dir / DEFAULT_RESULTS:
        words.append(f"--afd-results={settings.results}")
    return words


def _place(item: pytest.Item) -> str:
    """The file as this run's arguments could name it: a module, a relative or absolute path.

    Ids are relative to pytest's root folder, which need not be where the command was given.
    """
    if item.config.option.pyargs and (item.path.parent / "__init__.py").is_file():
        return _module(item.path)
    here = item.config.invocation_params.dir
    return str(item.path.relative_to(here) if item.path.is_relative_to(here) else item.path)


def _module(path: Path) -> str:
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)
