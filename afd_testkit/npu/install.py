"""Installs the emulated NPU in this process, and takes all of it out again."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch

from afd_testkit.npu import accelerator, adjustments, collectives, finder, libraries, tree
from afd_testkit.npu.device import EmulatedDevices
from afd_testkit.npu.errors import EmulationConflict
from afd_testkit.npu.patches import PatchSet
from afd_testkit.npu.redirect import RedirectMode
from afd_testkit.npu.settings import EmulationSettings
from afd_testkit.npu.stream_check import Place, check_streams, enter_thread, op_body
from afd_testkit.npu.stream_state import reset_streams

_installed: Emulation | None = None


class Emulation:
    """One installation; :meth:`remove` leaves the process as it was."""

    def __init__(self, settings: EmulationSettings) -> None:
        self.settings = settings
        self.devices = EmulatedDevices(settings)
        self.mode = RedirectMode()
        self._patches = PatchSet()

    def add_modules(self) -> None:
        """The closed modules alone: names import, nothing of torch changes but ``torch.npu``."""
        self._patches.later(reset_streams)
        modules = tree.build(self.devices)
        finder.install_closed(self._patches, modules)
        self._patches.attribute(torch, "npu", modules["torch.npu"])
        self._patches.entry(sys.modules, "torch.npu", modules["torch.npu"])

    def add_device(self) -> None:
        """Device, operators, collectives, and the hooks that threads and other modules need."""
        libraries.install(self._patches, self._in_body)
        accelerator.install(self._patches, self.devices)
        collectives.install(self._patches)
        finder.install_adjustments(
            self._patches, adjustments.adjustments(self._patches, self.settings)
        )
        self._follow_threads()
        stack = ExitStack()
        self._patches.later(stack.close)
        stack.enter_context(self.mode)
        if self._checks_streams:
            # Outside of the redirection, so that it sees where a tensor was meant to be.
            stack.enter_context(check_streams(unplaced=Place.HOST))

    @property
    def _checks_streams(self) -> bool:
        return self.settings.streams == "check"

    @contextmanager
    def _in_body(self) -> Generator[None, None, None]:
        """Around the body of a custom operator, in which torch turns modes off."""
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            if self._checks_streams:
                stack.enter_context(op_body())
            yield

    @contextmanager
    def _in_thread(self) -> Generator[None, None, None]:
        """Around what a thread runs: modes belong to one thread."""
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            if self._checks_streams:
                stack.enter_context(enter_thread())
            yield

    def _follow_threads(self) -> None:
        """Threads that are started from now on run under the emulation."""
        original = threading.Thread.start
        scope = self._in_thread

        @functools.wraps(original)
        def start(thread: threading.Thread) -> None:
            run = thread.run

            def run_emulated() -> None:
                with scope():
                    run()

            thread.run = run_emulated  # type: ignore[method-assign]
            original(thread)

        self._patches.attribute(threading.Thread, "start", start)

    def remove(self) -> None:
        """Undo everything."""
        global _installed
        try:
            self._patches.restore()
        finally:
            _installed = None


def install(settings: EmulationSettings | None = None, *, device: bool = True) -> Emulation:
    """Install once in this process; :class:`EmulationConflict` when it is installed already."""
    global _installed
    if _installed is not None:
        raise EmulationConflict("the emulated NPU is installed in this process already.")
    emulation = Emulation(settings or EmulationSettings.from_environment())
    _installed = emulation
    try:
        emulation.add_modules()
        if device:
            emulation.add_device()
    except BaseException:
        emulation.remove()
        raise
    return emulation


def installed() -> Emulation | None:
    """The installation of this process."""
    return _installed


@contextmanager
def emulated(
    settings: EmulationSettings | None = None, *, device: bool = True
) -> Generator[Emulation, None, None]:
    """The emulated NPU inside."""
    emulation = install(settings, device=device)
    try:
        yield emulation
    finally:
        emulation.remove()
