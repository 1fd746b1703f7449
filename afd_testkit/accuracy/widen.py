"""The small model with a wider latent, in exact arithmetic the same function.

Kernels for latent attention take one size only, 512 latent and 64 rotary values.  Zeros fill what
the small model lacks; the norm over the latent, whose mean would shrink with them, is kept by
scaling what goes in up and its weight down.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from afd_testkit.accuracy.recipe import LATENT, ROTARY
from afd_testkit.models.check import check_checkpoint

_WEIGHTS = "model.safetensors"


class CannotWiden(ValueError):
    """The checkpoint has no latent attention that could be widened."""


def widen(source: Path, out: Path) -> Path:
    """The checkpoint of ``source`` with a latent of 512, in float32, as the new folder ``out``.

    Raises :class:`CannotWiden` for a checkpoint without latent attention, with a wider latent,
    in several files, with weights of other sizes than its configuration says, or with other than
    64 rotary values, on which the rotation's frequencies depend; ``CheckpointError`` for none.
    """
    if out.exists():
        raise CannotWiden(f"{out} is there already; give a folder that is not")
    config = dict(check_checkpoint(source).config)
    latent, rotary = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if type(latent) is not int or not 0 < latent <= LATENT or rotary != ROTARY:
        raise CannotWiden(
            f"{source} has kv_lora_rank {latent} and qk_rope_head_dim {rotary}; 1 to {LATENT} and "
            f"exactly {ROTARY} can be widened"
        )
    if not (source / _WEIGHTS).is_file():
        raise CannotWiden(f"{source} has no {_WEIGHTS}; put its weights into that one file")
    weights = {name: value.float() for name, value in load_file(source / _WEIGHTS).items()}
    found = [name for name in weights if ".self_attn.kv_" in name]
    if not found:
        raise CannotWiden(f"{source / _WEIGHTS} has no weight of a latent attention")
    for name in found:
        weights[name] = _wider(name, weights[name], latent)
    shutil.copytree(source, out)
    config.update(kv_lora_rank=LATENT, dtype="float32")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(weights, out / _WEIGHTS, metadata={"format": "pt"})
    return out


def _wider(name: str, weight: Tensor, latent: int) -> Tensor:
    """The weight of one of the three modules that touch the latent."""
    _check_size(name, weight, latent)
    more, scale = LATENT - latent, (LATENT / latent) ** 0.5
    if name.endswith("kv_a_proj_with_mqa.weight"):  # [latent + rotary, hidden]
        rows, rotary = weight[:latent] * scale, weight[latent:]
        return torch.cat([rows, rows.new_zeros(more, rows.shape[1]), rotary])
    if name.endswith("kv_a_layernorm.weight"):  # [latent]
        return torch.cat([weight / scale, weight.new_zeros(more)])
    if name.endswith("kv_b_proj.weight"):  # [heads * (nope + v), latent]
        return torch.cat([weight, weight.new_zeros(weight.shape[0], more)], dim=1)
    raise CannotWiden(f"{name} touches the latent in a way that is not known here")


def _check_size(name: str, weight: Tensor, latent: int) -> None:
    """The configuration and the weight must agree on where the latent is."""
    size, expected = weight.shape[0], latent
    if name.endswith("kv_a_proj_with_mqa.weight"):
        expected = latent + ROTARY
    elif name.endswith("kv_b_proj.weight"):
        size = weight.shape[1]
    if size != expected:
        raise CannotWiden(
            f"{name} has {size} values of the latent, and the configuration says {expected}"
        )
