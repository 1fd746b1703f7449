"""The small model with a wider latent, in exact arithmetic the same function.

Kernels for latent attention take one size only, 512 latent and 64 rotary values.  Zeros fill what
the small model lacks; the norm over the latent, whose mean would shrink with them, is kept by
scaling what goes in up and its weight down.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from afd_testkit.accuracy.recipe import LATENT, ROTARY

_WEIGHTS = "model.safetensors"


class CannotWiden(ValueError):
    """The checkpoint has no latent attention that could be widened."""


def widen(source: Path, out: Path) -> Path:
    """The checkpoint of ``source`` with a latent of 512, in float32, as the folder ``out``.

    Raises :class:`CannotWiden` for a checkpoint without latent attention, with a wider latent,
    or with other than 64 rotary values, on which the rotation's frequencies depend.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    latent, rotary = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if not isinstance(latent, int) or latent > LATENT or rotary != ROTARY:
        raise CannotWiden(
            f"{source} has kv_lora_rank {latent} and qk_rope_head_dim {rotary}; at most {LATENT} "
            f"and exactly {ROTARY} can be widened"
        )
    weights = {name: value.float() for name, value in load_file(source / _WEIGHTS).items()}
    for name in [name for name in weights if ".self_attn.kv_" in name]:
        weights[name] = _wider(name, weights[name], latent)
    shutil.copytree(source, out, dirs_exist_ok=True)
    config.update(kv_lora_rank=LATENT, dtype="float32")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(weights, out / _WEIGHTS, metadata={"format": "pt"})
    return out


def _wider(name: str, weight: Tensor, latent: int) -> Tensor:
    """The weight of one of the three modules that touch the latent."""
    more, scale = LATENT - latent, (LATENT / latent) ** 0.5
    if name.endswith("kv_a_proj_with_mqa.weight"):  # [latent + rotary, hidden]
        rows, rotary = weight[:latent] * scale, weight[latent:]
        return torch.cat([rows, rows.new_zeros(more, rows.shape[1]), rotary])
    if name.endswith("kv_a_layernorm.weight"):  # [latent]
        return torch.cat([weight / scale, weight.new_zeros(more)])
    if name.endswith("kv_b_proj.weight"):  # [heads * (nope + v), latent]
        return torch.cat([weight, weight.new_zeros(weight.shape[0], more)], dim=1)
    raise CannotWiden(f"{name} touches the latent in a way that is not known here")
