"""A process that ends when the one that started it has ended, however that was."""

from __future__ import annotations

import os
import signal
import threading
import time

_LOOK_EVERY = 1.0  # seconds


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
