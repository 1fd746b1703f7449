"""Installs the emulated NPU in this process, and takes all of it out again."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from afd_testkit.npu import accelerator, adjustments, collectives, finder, libraries, tree
from afd_testkit.npu.device import EmulatedDevices, check_visible
from afd_testkit.npu.errors import EmulationConflict, EmulationError
from afd_testkit.npu.left import Left
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
        self.mode = RedirectMode(partial(check_visible, self.devices))
        self._modules = PatchSet()
        self._patches = PatchSet()
        self._left = Left()
        #: Whether torch's calls reach the device, not only the modules exist.
        self.has_device = False

    def add_modules(self) -> None:
        """The closed modules alone: names import, nothing of torch changes but ``torch.npu``."""
        self._modules.later(reset_streams)
        modules = tree.build(self.devices)
        finder.install_closed(self._modules, modules)
        self._modules.attribute(torch, "npu", modules["torch.npu"])
        self._modules.entry(sys.modules, "torch.npu", modules["torch.npu"])

    def add_device(self) -> None:
        """Device, operators, collectives, and the hooks that threads and other modules need."""
        self._left = Left()
        self.has_device = True
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

    def remove_device(self) -> list[str]:
        """Undo :meth:`add_device`; what was left on and has been turned off, by what to call."""
        if not self.has_device:
            return []
        # First: what was left may stand on top of what is taken away.
        try:
            return self._left.clear()
        finally:
            self.has_device = False
            self._patches.restore()

    def remove(self) -> list[str]:
        """Undo everything; what :meth:`remove_device` says."""
        global _installed
        try:
            return self.remove_device()
        finally:
            _installed = None
            self._modules.restore()


def install(settings: EmulationSettings | None = None, *, device: bool = True) -> Emulation:
    """Install once in this process; :class:`EmulationConflict` when it is installed already."""
    global _installed
    if _installed is not None:
        raise EmulationConflict(
            f"the emulated NPU is installed in this process already, with {_installed.settings}; "
            "use `with emulated()`, which takes the one that is there, or installed()."
        )
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
    """The emulated NPU inside: the one that is there already, or one that goes away again.

    :class:`EmulationConflict` when one with other ``settings`` is there.
    :class:`EmulationError` behind it when something was left on that would have outlived it.
    """
    if _installed is None:
        emulation = install(settings, device=device)
        remove = emulation.remove
    else:
        emulation = _installed
        _same(emulation.settings, settings)
        remove = Left().clear
        if device and not emulation.has_device:
            _add_device(emulation)
            remove = emulation.remove_device
    try:
        yield emulation
    except BaseException:
        remove()
        raise
    if left := remove():
        raise EmulationError(
            f"left on when the emulated NPU went away: {'; '.join(left)}. It is off now; turn it "
            "off where it is used."
        )


def _add_device(emulation: Emulation) -> None:
    try:
        emulation.add_device()
    except BaseException:
        emulation.remove_device()
        raise


def _same(there: EmulationSettings, wanted: EmulationSettings | None) -> None:
    if wanted in (None, there):
        return
    raise EmulationConflict(
        f"the emulated NPU is installed in this process already, with {there}, and {wanted} is "
        "asked for. Leave the settings out to use the one that is there, leave it first, or give "
        "them to the whole process: `afd-testkit emulate --help` names its options."
    )
