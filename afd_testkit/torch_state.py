"""What a test can leave changed in torch: names, switches, operators.

Looked at only where torch is already loaded; ``process_state`` says what is no leak.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

from afd_testkit.process_state import (
    ABSENT,
    Change,
    Channel,
    Imports,
    files_of,
    is_real,
    loaded,
    top_level,
)

#: torch's own lazily filled private state, which any first use changes, and ``Storage``, which
#: follows the default dtype (watched by itself).
_TORCH_OWN = frozenset({"_initialized", "_queued_calls", "_cached_device_count", "Storage"})


class TorchNames:
    """The attributes of a torch module, or of a class in it (its own, not inherited ones)."""

    remedy = "use monkeypatch.setattr"

    def __init__(self, module: str, of: str | None = None) -> None:
        self.name = module if of is None else f"{module}.{of}"
        self._module = module
        self._of = of

    def read(self) -> dict[str, Any] | None:
        """Attribute by name; of a class as its dictionary holds them, descriptors unbound."""
        module = loaded(self._module)
        if module is None:
            return None
        return dict(vars(module) if self._of is None else vars(vars(module)[self._of]))

    def tolerates(self, change: Change, imports: Imports) -> bool:
        """Submodules, lazily filled private state, and what a first import patched in."""
        if change.new is ABSENT:
            return False
        if change.key in _TORCH_OWN:
            return True
        if isinstance(change.new, ModuleType):
            return change.old is ABSENT and is_real(f"{self.name}.{change.key}", change.new)
        new = change.new.fget if isinstance(change.new, property) else change.new
        owner = getattr(new, "__module__", None)  # any object may stand here
        return isinstance(owner, str) and top_level(owner) in imports.packages

    def restore(self, change: Change) -> None:
        """Set or delete the attribute."""
        module = sys.modules[self._module]
        holder = module if self._of is None else vars(module)[self._of]
        if change.old is ABSENT:
            delattr(holder, change.key)
        else:
            setattr(holder, change.key, change.old)


class TorchDefaults:
    """Switches that hold for all that follows: default dtype, the seed of torch's default
    generator, gradients, deterministic operators (0 off, 1 warn, 2 error), number of threads."""

    name = "torch defaults"
    remedy = (
        "restore what was changed in a fixture; seed inside torch.random.fork_rng(), and turn "
        "gradients off with torch.no_grad()"
    )

    def read(self) -> dict[str, Any] | None:
        """``dtype``, ``seed``, ``gradients``, ``deterministic`` and ``threads``."""
        torch = loaded("torch")
        if torch is None:
            return None
        return {
            "dtype": torch.get_default_dtype(),
            "seed": torch.initial_seed(),
            "gradients": torch.is_grad_enabled(),
            "deterministic": torch.get_deterministic_debug_mode(),
            "threads": torch.get_num_threads(),
        }

    def tolerates(self, change: Change, imports: Imports) -> bool:
        """Never."""
        return False

    def restore(self, change: Change) -> None:
        """Set the old value; the random state is that of a fresh start from the old seed."""
        torch = sys.modules["torch"]
        if change.key == "deterministic":
            torch.set_deterministic_debug_mode(change.old)
            # use_deterministic_algorithms also sets a flag of the compiler, which it imports.
            if (compiler := loaded("torch._inductor.config")) is not None:
                compiler.deterministic = change.old > 0
            return
        setters = {
            "dtype": torch.set_default_dtype,
            "seed": torch.manual_seed,
            "gradients": torch.set_grad_enabled,
            "threads": torch.set_num_threads,
        }
        setters[change.key](change.old)


class Operators:
    """Operators defined from Python, by qualified name (``namespace::name``)."""

    name = "torch.ops"
    remedy = (
        "define operators in a scope that ends with the test (torch.library._scoped_library), "
        "or in a module of the package, once"
    )

    def read(self) -> dict[str, Any] | None:
        """Every name that a ``torch.library.Library`` holds; torch keeps the set in ``_defs``."""
        torch = loaded("torch")
        return None if torch is None else dict.fromkeys(torch.library._defs, True)

    def tolerates(self, change: Change, imports: Imports) -> bool:
        """Operators registered from a file of a package first imported here; dropping is not."""
        if change.new is ABSENT:
            return False
        custom = sys.modules["torch._library.custom_ops"].OPDEFS.get(change.key)
        if custom is not None:  # the dispatcher knows only torch's own file for these
            return top_level(custom._init_fn.__module__) in imports.packages
        # torch keeps the name as it was written, line breaks included
        dump = sys.modules["torch"]._C._dispatch_dump("".join(change.key.split()))
        found = re.search(r"^debug: registered at (.*):\d+$", dump, re.MULTILINE)
        return found is not None and found[1] in files_of(imports.packages)

    def restore(self, change: Change) -> None:
        """Nothing: torch drops an operator only together with its library.  Snapshots are
        taken anew for each test, so that the next one is not blamed."""


TORCH_CHANNELS: tuple[Channel, ...] = (
    TorchNames("torch"),
    TorchNames("torch.cuda"),
    TorchNames("torch.accelerator"),
    TorchNames("torch.nn.functional"),
    TorchNames("torch", of="Tensor"),
    TorchNames("torch.nn", of="Module"),
    TorchDefaults(),
    Operators(),
)
