"""Whether pytest took its settings from where it was started.

pytest looks for its ini file beside every argument that is a path.  It does so before it knows
the options of plugins, so that in ``--afd-model DIR`` the folder counts as a place of tests, and
with one of another place pytest finds no ini file, or another one, and collects other tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

#: Options with a path as their value.
_WITH_PATHS = (
    *("--afd-model", "--afd-gsm8k", "--afd-prompts", "--afd-results", "--afd-cache"),
    "--afd-baseline",
)


def check_own_ini(config: pytest.Config) -> None:
    """Raise :class:`pytest.UsageError` where an option's value led pytest to another ini file."""
    arguments = [str(one) for one in config.invocation_params.args]
    apart = [name for name in _WITH_PATHS if name in arguments]
    ours = _ini(config.invocation_params.dir)
    if not apart or ours is None or config.inipath == ours or _chosen(arguments):
        return
    raise pytest.UsageError(
        f"pytest took the value of {' and '.join(apart)} for a place of tests, and so "
        f"{config.inipath or 'no file'} for its settings instead of {ours}; write "
        f"{', '.join(f'{name}=VALUE' for name in apart)}, or add -c {ours}."
    )


def _chosen(arguments: Sequence[str]) -> bool:
    """Whether an ini file, or the root, is named by hand."""
    return any(
        one in ("-c", "--config-file", "--rootdir")
        or one.startswith(("-c/", "--config-file=", "--rootdir="))
        for one in arguments
    )


def _ini(start: Path) -> Path | None:
    """The ini file that pytest takes when it is started in ``start`` without arguments."""
    for folder in (start, *start.parents):
        for name, section in (("pytest.ini", "[pytest]"), ("pyproject.toml", "[tool.pytest")):
            path = folder / name
            if path.is_file() and section in path.read_text(encoding="utf-8", errors="replace"):
                return path
    return None
