"""The small model with a wider latent, in exact arithmetic the same function.

Kernels for latent attention take one size only, 512 latent and 64 rotary values.  Zeros fill what
the small model lacks; the norm over the latent, whose mean would shrink with them, is kept by
scaling what goes in up and its weight down.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from afd_testkit.accuracy.recipe import LATENT, ROTARY
from afd_testkit.models.check import check_checkpoint

_WEIGHTS = "model.safetensors"
_ATTENTION = ".self_attn.kv_"
#: Ends of names, rank, the axis along which the latent is, and what else is along it.
_TOUCHING = (
    ("a_proj_with_mqa.weight", 2, 0, ROTARY),
    ("a_layernorm.weight", 1, 0, 0),
    ("b_proj.weight", 2, 1, 0),
)


class CannotWiden(ValueError):
    """The checkpoint has no latent attention that could be widened."""


def widen(source: Path, out: Path) -> Path:
    """The checkpoint of ``source`` with a latent of 512, in float32, as the new folder ``out``.

    Raises :class:`CannotWiden` for a checkpoint without latent attention, with a wider latent,
    in several files, with weights of other sizes or dtypes than its configuration says, or with
    other than 64 rotary values, on which the rotation's frequencies depend; ``CheckpointError``
    for none.
    """
    if out.exists() or out.is_symlink() or out.resolve().is_relative_to(source.resolve()):
        raise CannotWiden(
            f"{out} is there already, or inside of {source}; give a folder that is not"
        )
    config = dict(check_checkpoint(source).config)
    latent, rotary = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if type(latent) is not int or not 0 < latent <= LATENT or rotary != ROTARY:
        raise CannotWiden(
            f"{source} has kv_lora_rank {latent} and qk_rope_head_dim {rotary}; 1 to {LATENT} and "
            f"exactly {ROTARY} can be widened"
        )
    files = sorted(one.name for one in source.glob("*.safetensors*"))
    if files != [_WEIGHTS]:
        raise CannotWiden(
            f"{source} has its weights in {', '.join(files)}; put them into one {_WEIGHTS}"
        )
    weights = load_file(source / _WEIGHTS)
    touching = _checked(weights, latent)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(_WEIGHTS))
    config.update(kv_lora_rank=LATENT, dtype="float32")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    wide = {
        name: _wider(name, value.float(), latent) if name in touching else value.float()
        for name, value in weights.items()
    }
    save_file(wide, out / _WEIGHTS, metadata={"format": "pt"})
    return out


def _checked(weights: Mapping[str, Tensor], latent: int) -> set[str]:
    """Names of what touches the latent, if every layer has all of it, in sizes of ``latent``."""
    found: set[str] = set()
    layers = {name.partition(_ATTENTION)[0] for name in weights if _ATTENTION in name}
    for layer, (end, rank, axis, more) in product(sorted(layers), _TOUCHING):
        name = f"{layer}{_ATTENTION}{end}"
        weight = weights.get(name)
        if weight is None:
            raise CannotWiden(f"{name} is missing; only whole latent attention can be widened")
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CannotWiden(f"{name} is {weight.dtype}; give the weights before quantization")
        if weight.ndim != rank or weight.shape[axis] != latent + more:
            raise CannotWiden(
                f"{name} has the shape {list(weight.shape)}, and {latent + more} of the latent "
                f"were to be along axis {axis} of {rank}, as the configuration says"
            )
        found.add(name)
    strange = [name for name in weights if _ATTENTION in name and name not in found]
    if strange or not found:
        raise CannotWiden(
            f"{strange[0]} touches the latent in a way that is not known here"
            if strange
            else "there is no weight of a latent attention to widen"
        )
    return found


def _wider(name: str, weight: Tensor, latent: int) -> Tensor:
    """The weight of one of the three modules that touch the latent."""
    more, scale = LATENT - latent, (LATENT / latent) ** 0.5
    if name.endswith("kv_a_proj_with_mqa.weight"):  # [latent + rotary, hidden]
        rows, rotary = weight[:latent] * scale, weight[latent:]
        return torch.cat([rows, rows.new_zeros(more, rows.shape[1]), rotary])
    if name.endswith("kv_a_layernorm.weight"):  # [latent]
        return torch.cat([weight / scale, weight.new_zeros(more)])
    # [heads * (nope + v), latent]
    return torch.cat([weight, weight.new_zeros(weight.shape[0], more)], dim=1)
