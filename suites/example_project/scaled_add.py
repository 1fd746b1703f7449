"""An operator of another project: adds a multiple of one tensor to another, in place."""

import torch

from afd_plugin.ops import OpDefinition


def scaled_add_(out: torch.Tensor, x: torch.Tensor, times: float) -> None:
    """``out += times * x``; shapes alike."""
    out.add_(x, alpha=times)


def fake(out: torch.Tensor, x: torch.Tensor, times: float) -> None:
    """Checks what tracing can check."""
    if out.shape != x.shape:
        raise ValueError(f"x is {list(x.shape)}; it must be {list(out.shape)}, as out is")


SCALED_ADD = OpDefinition("example", "scaled_add_", scaled_add_, ("out",), fake)
