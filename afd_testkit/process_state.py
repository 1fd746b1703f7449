"""What a test can leave changed in its process: one channel for each kind of state.

Here are those of Python, vLLM and the routing operator; ``torch_state`` has torch's.

A channel reads its state as a flat dictionary, says which differences are no leak, and puts
single entries back.  torch and vLLM are looked at only where they are already loaded.

Differences that come with the *first import of a package* are the package's, not the test's:

- ``sys.modules``: new real modules are always fine.  Aliases, and modules made without a spec
  (compiled extensions and lazy packages make them), are fine inside a package of which this test
  imported a real module for the first time; so are such a package replacing an entry of its own
  from the same file, and its giving one of its modules a second name.
- attributes of ``torch`` and its classes: torch's own submodules, and functions and classes that
  were defined in a package first imported here (it patched torch while it was imported).  The
  standard library does not count: importing ``unittest.mock`` does not excuse a mock.
- operators: those which the dispatcher says were registered from a file of such a package.
- ``os.environ``: the names in :data:`IMPORT_ENVIRONMENT`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

#: Stands for "not there", so that ``None`` in ``sys.modules`` stays a value.
ABSENT: Final = object()

#: Variables that a package sets while it is imported (seen with the versions in requirements/).
IMPORT_ENVIRONMENT: Mapping[str, frozenset[str]] = {
    "torch": frozenset({"TORCHINDUCTOR_CACHE_DIR"}),
    "vllm": frozenset(
        {
            "AITER_SITUV2_A4W4",
            "PYTORCH_NVML_BASED_CUDA_CHECK",
            "TILELANG_CLEANUP_TEMP_FILES",
            "TORCHINDUCTOR_COMPILE_THREADS",
            "TRITON_CACHE_AUTOTUNING",
        }
    ),
    "cv2": frozenset({"LD_LIBRARY_PATH"}),
}


class Change(NamedTuple):
    """One entry of a channel that differs; ``old`` or ``new`` may be :data:`ABSENT`."""

    channel: str
    key: str
    old: Any
    new: Any


class Imports(NamedTuple):
    """What was imported between two snapshots.

    ``tops``: top-level names of the new real modules; ``packages``: those, without the standard
    library.
    ``placeholders``: parents of the collected test file, for which pytest may make empty modules.
    """

    tops: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()
    placeholders: frozenset[str] = frozenset()

    @classmethod
    def between(
        cls, old: Mapping[str, Any], new: Mapping[str, Any], collected: str | None = None
    ) -> Imports:
        """New entries of ``new``, a later content of ``sys.modules``.

        ``collected`` is the file of the test module that was imported meanwhile, if any: what
        that does while it is imported is its own doing, not some package's.
        """
        modules = [name for name, mod in new.items() if name not in old and is_real(name, mod)]
        own = [name for name in modules if _file(new[name]) == collected is not None]
        tops = {top_level(name) for name in modules} - {top_level(name) for name in own}
        placeholders = {
            name[:place] for name in own for place, char in enumerate(name) if char == "."
        }
        packages = tops - sys.stdlib_module_names
        return cls(frozenset(tops), frozenset(packages), frozenset(placeholders))


def is_real(name: str, module: object) -> bool:
    """Whether an import of ``name`` made ``module``: it has a spec of that name, which has a
    loader or a path."""
    if not isinstance(module, ModuleType):
        return False
    spec = vars(module).get("__spec__")
    return (
        spec is not None
        and spec.name == name
        and (spec.loader is not None or spec.submodule_search_locations is not None)
    )


class Channel(Protocol):
    """One kind of process state."""

    name: str
    remedy: str

    def read(self) -> dict[str, Any] | None:
        """The state now, ``None`` where its owner is not loaded."""
        ...

    def tolerates(self, change: Change, imports: Imports) -> bool:
        """Whether ``change`` is no leak, given what was imported meanwhile."""
        ...

    def restore(self, change: Change) -> None:
        """Put ``change.old`` back, as far as that is possible."""
        ...


class ModuleTable:
    """``sys.modules``."""

    name = "sys.modules"
    remedy = "use monkeypatch.setitem(sys.modules, ...) or monkeypatch.delitem"

    def read(self) -> dict[str, Any]:
        """Module by name."""
        return dict(sys.modules)

    def tolerates(self, change: Change, imports: Imports) -> bool:
        """Real modules are; see the module's docstring for those without a spec."""
        if change.new is ABSENT or not isinstance(change.new, ModuleType):
            return False
        top = top_level(change.key)
        new_is_real = is_real(change.key, change.new)
        if change.old is not ABSENT and is_real(change.key, change.old):
            return (
                new_is_real and top in imports.packages and _file(change.old) == _file(change.new)
            )
        # multiprocessing gives the main module a second name.
        if new_is_real or change.key == "__mp_main__" or change.key in imports.placeholders:
            return True
        # Cython makes one such top-level module a compiler version, shared by all extensions.
        if top in imports.tops or top.startswith(("_cython_", "cython_runtime")):
            return True
        # A second name, which its own package gave to a module.
        own_name = change.new.__name__
        return is_real(own_name, change.new) and top_level(own_name) in imports.packages

    def restore(self, change: Change) -> None:
        """Put the entry back or take it out."""
        _put(sys.modules, change)


class Environment:
    """``os.environ``."""

    name = "os.environ"
    remedy = "use monkeypatch.setenv or monkeypatch.delenv"

    def read(self) -> dict[str, Any]:
        """Variables, without the one that pytest itself changes all the time."""
        variables = dict(os.environ)
        variables.pop("PYTEST_CURRENT_TEST", None)
        return variables

    def tolerates(self, change: Change, imports: Imports) -> bool:
        """Variables that a first import is known to set."""
        return change.old is ABSENT and any(
            change.key in IMPORT_ENVIRONMENT.get(package, ()) for package in imports.packages
        )

    def restore(self, change: Change) -> None:
        """Set or unset the variable."""
        _put(os.environ, change)


class ForwardContext:
    """vLLM's current forward context, a global of its module."""

    name = "vllm.forward_context"
    remedy = "enter it with a context manager that restores it, also after an exception"

    def read(self) -> dict[str, Any] | None:
        """The one global; a vLLM without it is an error, since the guard would be blind."""
        module = loaded(self.name)
        return None if module is None else {"_forward_context": vars(module)["_forward_context"]}

    def tolerates(self, change: Change, imports: Imports) -> bool:
        """Never."""
        return False

    def restore(self, change: Change) -> None:
        """Set the old context."""
        _put(vars(sys.modules[self.name]), change)


class RoutingState:
    """What the routing operator of this process is told: by whom, and who looks on.

    Where :mod:`afd_plugin.routing` is not loaded nothing is bound, so that a test that imports it
    is judged as well.
    """

    name = "afd_plugin.routing"
    remedy = (
        "enter profile_run, watch_routing and bound_runtime by `with`; where the test calls "
        "register_routing_op, register ROUTING_OP with the fixture op_library first"
    )

    def read(self) -> dict[str, Any]:
        """``bound_runtime``, ``profile_run``, and ``watch_routing[n]`` for each watcher."""
        module = loaded(self.name)
        if module is None:
            return {"bound_runtime": None, "profile_run": False}
        process = module._process
        watchers = {f"watch_routing[{n}]": each for n, each in enumerate(process.watchers)}
        return {
            "bound_runtime": process.runtime,
            "profile_run": module._profiling.get(),
            **watchers,
        }

    def tolerates(self, change: Change, imports: Imports) -> bool:
        """Never."""
        return False

    def restore(self, change: Change) -> None:
        """Bind the old runtime, clear or set the flag, dismiss a watcher or call it back."""
        module = loaded(self.name)
        if module is None:  # it took its state along
            return
        if change.key == "bound_runtime":
            module._process.runtime = change.old
        elif change.key == "profile_run":
            module._profiling.set(change.old)
        else:
            watchers: list[Any] = module._process.watchers
            if change.new is not ABSENT:
                watchers.remove(change.new)
            if change.old is not ABSENT:
                watchers.append(change.old)


def _put(table: MutableMapping[str, Any], change: Change) -> None:
    """Put the old value back into ``table``, or take the key out."""
    if change.old is ABSENT:
        table.pop(change.key, None)
    else:
        table[change.key] = change.old


def files_of(packages: frozenset[str]) -> set[str | None]:
    """Source files of all loaded modules of ``packages``."""
    return {_file(mod) for name, mod in list(sys.modules.items()) if top_level(name) in packages}


def top_level(name: str) -> str:
    """The package of a dotted module name."""
    return name.partition(".")[0]


def _file(module: object) -> str | None:
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else None


def loaded(name: str) -> Any:
    """The module if it is loaded and real; a stand-in has no state worth watching."""
    module = sys.modules.get(name)
    return module if is_real(name, module) else None
