"""Transformers' answer for one prompt, from a process of its own.

    python engine_oracle.py MODEL_FOLDER TOKENS.npy OUT.npz

``OUT.npz`` holds ``logprobs`` [tokens, vocabulary] (float32 model, float64 log-softmax) and,
for each layer i, ``keys{i}`` and ``values{i}`` [tokens, heads, size] after rotation.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main(folder: str, tokens_file: str, out_file: str) -> None:
    """One forward pass over the whole prompt."""
    torch.set_num_threads(1)
    tokens = torch.from_numpy(np.load(tokens_file))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    with torch.no_grad():
        out = model(tokens[None], use_cache=True)
        arrays = {"logprobs": torch.log_softmax(out.logits[0].double(), dim=-1)}
        cached = zip(model.model.layers, out.past_key_values.layers, strict=True)
        for index, (layer, cache) in enumerate(cached):
            keys, values = cache.keys, cache.values
            if model.config.model_type == "deepseek_v3":  # the cache holds latents
                keys, values = layer.self_attn.expand_kv(keys, values)
            arrays[f"keys{index}"] = keys[0].transpose(0, 1)
            arrays[f"values{index}"] = values[0].transpose(0, 1)
    np.savez(out_file, **{name: tensor.numpy() for name, tensor in arrays.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
