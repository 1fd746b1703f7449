"""What the processes that answer have in common: no hub, a log, and no life of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

_LOOK_EVERY = 1.0  # seconds
_TAIL = 15  # lines


def offline_environment(folder: Path) -> dict[str, str]:
    """This environment with the hub out of reach; datasets keep what they make in ``folder``."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
    }


def end_of(log: Path) -> str:
    """The last lines of a log, or nothing where there is none."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:])


def end_with_parent() -> None:
    """From now on this process, and its group, do not outlive the one that started it.

    A killed parent can tell nobody; its children then get another one, which is looked for.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
