"""The inside of one rank's process; started by ``afd_testkit.ranks``, which says what it means.

It runs as a script, and imports nothing outside the standard library before the stack can be
asked for.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

STACK_SIGNAL = signal.SIGUSR1


class Request(NamedTuple):
    """What a rank is asked to do; ``payload`` is pickled apart, since it needs ``path``.

    ``module``, ``file``, ``function``: the name of the function's module, the file that it came
    from, and the qualified name in it.  ``payload``: the positional arguments.
    """

    path: list[str]
    module: str
    file: str | None
    function: str
    payload: bytes


class Outcome(NamedTuple):
    """What a rank did.  ``error`` is ``None`` where it returned, or cannot be pickled."""

    returned: bool
    value: Any
    error: BaseException | None
    text: str


def die_with_parent() -> None:
    """End this process and its children as soon as the parent's end of stdin closes."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def load(request: Request) -> Callable[..., Any]:
    """The function, from its module or, where no import finds that, from the module's file.

    Test modules under pytest's importlib mode have names that only pytest can import.
    """
    try:
        module = importlib.import_module(request.module)
    except ModuleNotFoundError as error:
        if request.file is None or not request.module.startswith(error.name or "?"):
            raise
        spec = importlib.util.spec_from_file_location(request.module, request.file)
        if spec is None or spec.loader is None:
            raise
        _add_parents(request.module, Path(request.file))
        module = importlib.util.module_from_spec(spec)
        sys.modules[request.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for name in request.function.split("."):
        found = getattr(found, name)
    function: Callable[..., Any] = found
    return function


def _add_parents(module: str, file: Path) -> None:
    """Packages for the folders above ``file``: pickle imports them for what ``module`` holds."""
    names = module.split(".")[:-1]
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(file.parents[len(names) - depth])]
            sys.modules[name] = package


def _portable(error: BaseException) -> BaseException | None:
    """The error if it survives pickling, else ``None``: its text travels in any case."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copy if type(copy) is type(error) else None


def perform(request: Request) -> bytes:
    """Run the function; a pickled :class:`Outcome`, as a plain tuple, whatever happens."""
    sys.path[:] = request.path
    try:
        function = load(request)
        value = function(*pickle.loads(request.payload))
        return pickle.dumps(tuple(Outcome(True, value, None, "")))
    except BaseException as error:
        outcome = Outcome(False, None, _portable(error), traceback.format_exc())
        return pickle.dumps(tuple(outcome))


def main(folder: str, rank: str) -> None:
    """Read the request, run it, and leave the outcome beside it, complete or not at all."""
    place = Path(folder)
    stack = (place / f"stack-{rank}").open("w")  # open as long as the process lives
    faulthandler.enable(stack)
    faulthandler.register(STACK_SIGNAL, stack, all_threads=True)
    die_with_parent()
    request = Request(*pickle.loads((place / f"request-{rank}").read_bytes()))
    unfinished = place / f"unfinished-{rank}"
    unfinished.write_bytes(perform(request))
    unfinished.rename(place / f"outcome-{rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
