"""``npu-smi`` of the emulated NPU: ``info`` and ``info -l``, enough for code that asks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from afd_testkit.npu.settings import SOCS, EmulationSettings

USAGE = "usage: npu-smi info [-l]   (emulated NPU of afd-testkit; nothing else is emulated)"


def main(arguments: Sequence[str]) -> int:
    """Print what is asked; 2 for anything that is not emulated."""
    settings = EmulationSettings.from_environment(os.environ)
    soc = SOCS[settings.soc]
    if list(arguments) == ["info"]:
        print(f"| npu-smi emulated by afd-testkit: {settings.devices} x {soc.device} |")
        for index in range(settings.devices):
            print(f"| {index}  {soc.device}  | OK | emulated NPU |")
        return 0
    if list(arguments) == ["info", "-l"]:
        print(f"\tTotal Count                    : {settings.devices}")
        for index in range(settings.devices):
            print(f"\tNPU ID                         : {index}")
            print("\tChip Count                     : 1")
        return 0
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
