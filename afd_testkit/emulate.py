"""``afd-testkit emulate``: any command under the emulated NPU, and what that emulates.

The command takes the place of this process: its exit status, signals and output are its own.
Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from afd_testkit.npu import limits
from afd_testkit.npu.errors import EmulationError
from afd_testkit.npu.process import emulated_environment
from afd_testkit.npu.settings import (
    MLA_CASTS,
    SOCS,
    STREAM_MODES,
    EmulationSettings,
    visible_devices,
)

UNUSABLE = 2
#: Columns of ``--list`` where the output is no terminal.
WIDTH = 120


class CannotEmulate(Exception):
    """What keeps a command from being run under the emulation."""


def add_parser(commands: Any) -> None:
    """The sub-command ``emulate`` among the ``commands`` of an argparse parser."""
    parser = commands.add_parser(
        "emulate",
        help="run a command on the emulated NPU",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT …]\n       %(prog)s --list",
        description="Run a command, and every process that it starts, on an NPU that is emulated "
        "on the CPU. Options that are not given come from the environment (AFD_NPU_…), as in a "
        "process that runs under the emulation already.",
        epilog="Nothing that was measured under the emulation is evidence for a device.",
    )
    parser.add_argument("--soc", choices=tuple(SOCS), help="system on chip (default: A2)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices that the host shows (default: 8)"
    )
    parser.add_argument(
        "--relax",
        action="append",
        choices=limits.KINDS,
        default=[],
        metavar="KIND",
        help=f"do not enforce this kind of kernel limit: {', '.join(limits.KINDS)}; repeatable",
    )
    parser.add_argument(
        "--streams",
        choices=STREAM_MODES,
        help="check: report accesses that no event, wait or synchronize orders (default: off)",
    )
    parser.add_argument(
        "--mla-cast",
        choices=MLA_CASTS,
        help="lift: leave out the real code's cast of MLA prefill to bf16 (default: keep)",
    )
    parser.add_argument(
        "--list", action="store_true", help="show what is emulated, refused and enforced, and why"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the list, or become the command; returns only when there is nothing to become."""
    try:
        if arguments.list:
            _needs_torch()
            return _show_list()
        command = _command(arguments.command)
        environment = environment_for(arguments)
        _needs_torch()
        _become(command, environment)
    except (CannotEmulate, EmulationError, ValueError) as error:
        print(f"afd-testkit emulate: {error}", file=sys.stderr)
        return UNUSABLE


def environment_for(
    arguments: argparse.Namespace, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The command's environment: ``base``, and the options over what ``base`` says of them."""
    given = {
        name: value
        for name in ("soc", "devices", "streams", "mla_cast")
        if (value := vars(arguments)[name]) is not None
    }
    settings = replace(EmulationSettings.from_environment(base), **given)
    environment = emulated_environment(settings, base)
    visible_devices(settings.devices, base)
    if kinds := limits.relaxed_kinds(base) | set(arguments.relax):
        environment[limits.VARIABLE] = ",".join(sorted(kinds))
    return environment


def _command(given: Sequence[str]) -> list[str]:
    command = list(given[1:] if given[:1] == ["--"] else given)
    if not command:
        raise CannotEmulate(
            "no command is given; write it after --, as in "
            "`afd-testkit emulate -- python -m pytest tests`, or use --list."
        )
    return command


def _needs_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise CannotEmulate(
            f"{sys.executable} has no torch, on whose CPU tensors the emulated NPU computes; "
            "install torch there, or run afd-testkit from the environment that has it."
        )


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    found = shutil.which(command[0], path=environment["PATH"])
    if found is None:
        raise CannotEmulate(
            f"{command[0]!r} is no command: there is no such executable file on PATH. "
            "Give a name on PATH or the path of an executable file."
        )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(found, list(command), environment)
    except OSError as error:
        raise CannotEmulate(f"{found} cannot be run: {error.strerror}.") from error


def _show_list() -> int:
    from rich.console import Console

    from afd_testkit.npu import catalogue

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for part in catalogue.parts():
        console.print(part)
    return 0
