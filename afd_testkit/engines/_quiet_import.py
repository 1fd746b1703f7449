"""Imports for a fork server, without a word."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence


def import_quietly(modules: Sequence[str]) -> None:
    """Import ``modules``; what they print belongs in no test's output.

    Only imports: a thread or a parallel kernel started here would not survive the fork.  An
    import that fails here fails again in the engine's process, where it is reported.
    """
    saved = [os.dup(fd) for fd in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(null, fd)
        for module in modules:
            importlib.import_module(module)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(null)
