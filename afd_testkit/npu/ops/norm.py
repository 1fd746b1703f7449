"""Normalization and activation.

All of them compute in float32 and round once, to the dtype of their output.  A device rounds
also in between: its fp16 and bf16 results may differ in the last place.
"""

from __future__ import annotations

import torch

from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import FLOATS, limit_dtype, limit_layout, require

_DOCS = "torch_npu 2.10.0 operator documentation and shape functions"
_ADD_BIAS = "vllm-ascend 0.23.0 csrc/moe/add_rms_norm_bias"


def _normalized(
    name: str, x: torch.Tensor, like: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * rstd`` and ``rstd`` in float32; ``like`` is the caller's input, for its dtype.

    The mean square goes over the last ``gamma.dim()`` axes; ``rstd`` has 1 in each of them.
    """
    limit_dtype(name, "the input", like, FLOATS)
    limit_dtype(name, "gamma", gamma, (like.dtype,))
    axes = list(range(x.dim() - gamma.dim(), x.dim()))
    require(
        name,
        x.dim() >= gamma.dim() >= 1 and list(x.shape[-gamma.dim() :]) == list(gamma.shape),
        f"gamma has shape {list(gamma.shape)}, the input {list(x.shape)}; gamma's shape must be "
        "the input's last axes",
    )
    rstd = torch.rsqrt(x.square().mean(dim=axes, keepdim=True) + epsilon)
    return x * rstd, rstd


@operator(
    "torch_npu.npu_rms_norm",
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    source=_DOCS,
)
def npu_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input / sqrt(mean(input²) + epsilon) * gamma`` over the axes of ``gamma``.

    ``input``: ``[..., *gamma.shape]``, fp16, bf16 or fp32; ``gamma``: the same dtype.  Returns the
    result in the input's dtype and shape, and the reciprocal root mean square in fp32, with 1 in
    each axis of ``gamma``.
    """
    normal, rstd = _normalized("npu_rms_norm", input.float(), input, gamma, epsilon)
    return (normal * gamma.float()).to(input.dtype), rstd


@operator(
    "torch_npu.npu_gemma_rms_norm",
    "npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    source=_DOCS,
)
def npu_gemma_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`npu_rms_norm`, with ``1 + gamma`` for ``gamma``."""
    normal, rstd = _normalized("npu_gemma_rms_norm", input.float(), input, gamma, epsilon)
    return (normal * (1.0 + gamma.float())).to(input.dtype), rstd


@operator(
    "_C_ascend.npu_gemma_rms_norm",
    "npu_gemma_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor rstd)",
    source="vllm-ascend 0.23.0 csrc/torch_binding.cpp and its caller in device_op.py",
)
def ascend_gemma_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as torch_npu's :func:`npu_gemma_rms_norm`."""
    return npu_gemma_rms_norm(x, gamma, epsilon)


def _add_rms_norm(
    name: str,
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    limit_dtype(name, "x2", x2, (x1.dtype,))
    require(
        name,
        x1.shape == x2.shape,
        f"x1 has shape {list(x1.shape)}, x2 {list(x2.shape)}; they must be equal",
    )
    # The kernel normalizes the sum before it is rounded (bf16); only the returned sum is rounded.
    total = x1.float() + x2.float()
    normal, rstd = _normalized(name, total, x1, gamma, epsilon)
    y = normal * gamma.float()
    if beta is not None:
        limit_dtype(name, "beta", beta, (x1.dtype,))
        require(
            name,
            beta.shape == gamma.shape,
            f"beta has shape {list(beta.shape)}, gamma {list(gamma.shape)}; they must be equal",
        )
        y = y + beta.float()
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


@operator(
    "torch_npu.npu_add_rms_norm",
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)"
    " -> (Tensor, Tensor, Tensor)",
    source=_DOCS,
)
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm of ``x1 + x2``.

    ``x1``, ``x2``: equal shapes ``[..., *gamma.shape]`` and dtypes (fp16, bf16, fp32).  Returns
    the normalized result, the fp32 reciprocal root mean square, and ``x1 + x2``.
    """
    return _add_rms_norm("npu_add_rms_norm", x1, x2, gamma, None, epsilon)


@operator(
    "_C_ascend.npu_add_rms_norm_bias",
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None,"
    " float epsilon=1e-6) -> (Tensor y, Tensor rstd, Tensor x)",
    source=_ADD_BIAS,
)
def npu_add_rms_norm_bias(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`npu_add_rms_norm`, with ``beta`` added to the result.

    ``beta`` has the shape and dtype of ``gamma``; ``epsilon`` must not be negative.
    """
    limit_layout(
        "_C_ascend.npu_add_rms_norm_bias",
        epsilon >= 0,
        f"epsilon is {epsilon}; it must not be negative",
    )
    return _add_rms_norm("_C_ascend.npu_add_rms_norm_bias", x1, x2, gamma, beta, epsilon)


@operator(
    "torch_npu.npu_swiglu",
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    source=_DOCS,
)
def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``A * sigmoid(A) * B``, where ``A`` and ``B`` are the halves of ``input`` along ``dim``.

    ``input``: 1 to 8 axes, fp16, bf16 or fp32, an even extent along ``dim``, which the result
    halves.
    """
    limit_dtype("npu_swiglu", "input", input, FLOATS)
    axes = input.dim()
    require(
        "npu_swiglu",
        axes >= 1 and -axes <= dim < axes,
        f"input has {axes} axes and dim is {dim}; there must be that axis to halve",
    )
    limit_layout("npu_swiglu", axes <= 8, f"input has {axes} axes; the kernel takes 1 to 8")
    extent = input.shape[dim]
    require(
        "npu_swiglu",
        extent % 2 == 0,
        f"input has {extent} elements along dim {dim}; the number must be even",
    )
    gate, up = input.float().chunk(2, dim=dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


@operator("torch_npu.npu_fast_gelu", "npu_fast_gelu(Tensor input) -> Tensor", source=_DOCS)
def npu_fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """``x / (1 + exp(-1.702 x))``, the formula documented for A2 and A3; any shape to 8 axes."""
    limit_dtype("npu_fast_gelu", "input", input, FLOATS)
    axes = input.dim()
    limit_layout("npu_fast_gelu", axes <= 8, f"input has {axes} axes; the kernel takes up to 8")
    x = input.float()
    return (x * torch.sigmoid(1.702 * x)).to(input.dtype)
