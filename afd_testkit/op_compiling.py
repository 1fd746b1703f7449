"""Compiling in a test: anew, in this process, and without leaving anything behind."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Generator, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

#: What inductor leaves in the process, by how its names begin: its folder and a pointer that its
#: kernels read when they are loaded; the code that it generated.
_VARIABLES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_")
_MODULES = ("torch._inductor.runtime.compile_tasks.",)


@contextmanager
def compiling() -> Generator[None, None, None]:
    """Compile inside, anew and in this process, and leave neither code, settings nor patches.

    Graphs kept on disk are not used: a cached one says nothing of the operator as it is now.
    Dynamo patches ``torch.nn.Module`` when it first compiles; that too is undone.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    with warnings.catch_warnings():
        # torch's own, while it is imported for the first time.
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is", DeprecationWarning)
        import torch._inductor.compile_fx
        import torch._inductor.config as inductor
    with ExitStack() as stack:
        stack.enter_context(_attributes_kept(torch.nn.Module))
        stack.enter_context(_new_names_dropped(os.environ, _VARIABLES))
        stack.enter_context(_new_names_dropped(sys.modules, _MODULES))
        stack.enter_context(dynamo.patch(recompile_limit=256, accumulated_recompile_limit=1024))
        stack.enter_context(inductor.patch(fx_graph_cache=False, compile_threads=1))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        stack.callback(torch._dynamo.reset)
        torch._dynamo.reset()
        yield


@contextmanager
def _attributes_kept(of: type) -> Generator[None, None, None]:
    before = dict(vars(of))
    try:
        yield
    finally:
        for name, value in dict(vars(of)).items():
            if name not in before:
                delattr(of, name)
            elif value is not before[name]:
                setattr(of, name, before[name])


@contextmanager
def _new_names_dropped(
    table: MutableMapping[str, Any], prefixes: tuple[str, ...]
) -> Iterator[None]:
    """What inductor adds to ``table`` while it generates and loads code."""
    before = set(table)
    try:
        yield
    finally:
        for name in set(table) - before:
            if name.startswith(prefixes):
                del table[name]
