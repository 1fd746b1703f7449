"""Python runs this at start-up when its folder is on PYTHONPATH, as under `afd-testkit emulate`.

It installs the emulated NPU as soon as torch has been imported, in every Python process that
inherits the environment, and then runs the ``sitecustomize`` that it stands in front of.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


def _next_sitecustomize() -> None:
    elsewhere = [place for place in sys.path if os.path.abspath(place) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _start() -> None:
    from afd_testkit.npu.process import EMULATED, install_with_torch

    if os.environ.get(EMULATED) == "1":
        install_with_torch()


_next_sitecustomize()
_start()
