"""Transformers' answers, from a process of its own that serves one model.

    python oracle.py MODEL_FOLDER

For each line ``TOKENS.npy OUT.npz`` on stdin, ``OUT.npz`` gets ``logprobs`` [tokens, vocabulary]
(float32 model, float64 log-softmax) and for each layer i what its KV cache is made of:
``keys{i}`` and ``values{i}`` [tokens, heads, size] after rotation, or, for latent attention,
``latent{i}`` [tokens, rank], taken after its norm.  Then ``done`` is written to stdout.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def answer(model: Any, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """One forward pass over the whole sequence."""
    latents: list[torch.Tensor] = []
    latent = model.config.model_type == "deepseek_v3"
    hooks = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(
            lambda module, args, output: latents.append(output)
        )
        for layer in (model.model.layers if latent else ())
    ]
    with torch.no_grad():
        out = model(tokens[None], use_cache=True)
    for hook in hooks:
        hook.remove()
    arrays = {"logprobs": torch.log_softmax(out.logits[0].double(), dim=-1)}
    arrays |= {f"latent{i}": rows.reshape(tokens.numel(), -1) for i, rows in enumerate(latents)}
    for index, cache in enumerate(() if latent else out.past_key_values.layers):
        arrays[f"keys{index}"] = cache.keys[0].transpose(0, 1)
        arrays[f"values{index}"] = cache.values[0].transpose(0, 1)
    return {name: tensor.numpy() for name, tensor in arrays.items()}


def main(folder: str) -> None:
    """Answer lines until there are no more."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    for line in sys.stdin:
        tokens_file, out_file = line.split()
        np.savez(out_file, **answer(model, torch.from_numpy(np.load(tokens_file))))
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
