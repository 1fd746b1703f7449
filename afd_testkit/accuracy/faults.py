"""Faults of different kind and size under which accuracy is asked, to see which signal shows them.

Some are the gates' own; the others touch the model itself and are small on purpose: accuracy
alone does not see all of them.  All act only in steps that run as two stages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from afd_plugin import context
from afd_testkit.faults import CONTROL, FAULTS, Fault, FaultTarget
from afd_testkit.faults.base import patched

_NOISE_SEED = 20


class UnknownFault(LookupError):
    """No fault has this name."""


def _moved_positions(by: int) -> Callable[[FaultTarget], AbstractContextManager[None]]:
    """Every layer is told positions of stage 1 that are ``by`` too large."""

    def hook(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if context.current_stage() != 1:
            return None
        if "positions" in kwargs:
            return args, {**kwargs, "positions": kwargs["positions"] + by}
        return (args[0] + by, *args[1:]), kwargs

    @contextmanager
    def inject(target: FaultTarget) -> Generator[None, None, None]:
        hooks = [
            layer.register_forward_pre_hook(hook, with_kwargs=True)
            for layer in target.decoder_layers()
        ]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    return inject


def _experts_give(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[FaultTarget], AbstractContextManager[None]]:
    """The last layer's experts (routed and shared) give ``change(what they gave)``."""

    def hook(_mlp: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        return None if context.current_stage() is None else change(output)

    @contextmanager
    def inject(target: FaultTarget) -> Generator[None, None, None]:
        handle = target.decoder_layers()[-1].mlp.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    return inject


def _noise(output: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(_NOISE_SEED)
    return output * (1 + 0.1 * torch.randn(output.shape, generator=draw, dtype=output.dtype))


def _next_expert(target: FaultTarget) -> AbstractContextManager[None]:
    """In the first sparse layer, stage 1's tokens go to the neighbours of their experts."""
    # Ids are below the number of experts, which the largest of a step is near enough to.
    router = target.moe_routers()[0]

    def make(select_experts: Any) -> Any:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            weights, ids = select_experts(*args, **kwargs)
            if context.current_stage() == 1:
                ids = (ids + 1) % (ids.max() + 1)
            return weights, ids

        return faulty

    return patched(router, "select_experts", make)


_OWN = (
    Fault("positions-off-by-one", "positions of stage 1 are 1 too large", (), _moved_positions(1)),
    Fault("positions-off-by-four", "positions of stage 1 are 4 too large", (), _moved_positions(4)),
    Fault(
        "last-experts-dropped",
        "the last layer's experts give nothing for prompt tokens",
        (),
        _experts_give(torch.zeros_like),
    ),
    Fault(
        "expert-rows-off-by-one",
        "each token gets what the last layer's experts gave for the one before it",
        (),
        _experts_give(lambda output: output.roll(1, 0)),
    ),
    Fault(
        "noise-10-percent",
        "what the last layer's experts give is off by 10 %, at random",
        (),
        _experts_give(_noise),
    ),
    Fault(
        "experts-in-bfloat16",
        "what the last layer's experts give is rounded to 8 significant bits",
        (),
        _experts_give(lambda output: output.to(torch.bfloat16).to(output.dtype)),
    ),
    Fault("next-expert", "stage 1's tokens go to the wrong experts in one layer", (), _next_expert),
)
#: The gates' faults that are tried here too: what a splitter gets wrong most easily.
_OF_GATES = (
    "computed-not-advanced",
    "positions-rebased",
    "merge-swapped",
    "routing-table-shared",
)
SENSITIVITY: Mapping[str, Fault] = {
    fault.name: fault for fault in (*_OWN, *(FAULTS[name] for name in _OF_GATES))
}


def fault(name: str) -> Fault:
    """The fault of this name, or the injection of nothing; raises :class:`UnknownFault`."""
    known = {**SENSITIVITY, CONTROL: FAULTS[CONTROL]}
    if name not in known:
        raise UnknownFault(f"unknown fault {name!r}; known: {', '.join(sorted(known))}")
    return known[name]
