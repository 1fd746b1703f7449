"""The built-in models: small, but with every part of the architecture they stand for.

A recipe is a Hugging Face configuration plus the list of its tensors.  Scales are chosen
so that log-probabilities spread over several nats and attention is selective: a wrong KV
row moves log-probabilities by far more than any tolerance.  Notation: a matrix with
standard deviation s maps a vector of n unit-variance entries to entries of s * sqrt(n).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from afd_testkit.models.errors import UnknownRecipe
from afd_testkit.models.tokens import BOS_ID, EOS_ID, PAD_ID

# Raise it when the making of weights changes without a change of any recipe.
FORMAT_VERSION = 1
VOCAB_SIZE = 320  # 264 tokens with a text, the rest valid but mute, as in real vocabularies


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: uniform around ``center`` with standard deviation ``std``."""

    name: str
    shape: tuple[int, ...]
    std: float
    center: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """A model that is made, not downloaded.

    ``dtype``: the checkpoint's, ``"float32"`` or ``"bfloat16"``.
    ``environment``: variables that an engine's process needs for this model.
    ``dtypes``: engine dtypes that the model is meant for.
    ``needs_amx``: its attention kernels exist only for CPUs with AMX tiles.
    """

    name: str
    version: int
    seed: int
    dtype: str
    dtypes: tuple[str, ...]
    config: Mapping[str, Any]
    tensors: tuple[TensorSpec, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_amx: bool = False

    @property
    def digest(self) -> str:
        """Hash of all that determines the files' content (hexadecimal)."""
        parts = {
            "format": FORMAT_VERSION,
            "seed": self.seed,
            "dtype": self.dtype,
            "config": dict(self.config),
            "tensors": [[t.name, t.shape, t.std, t.center] for t in self.tensors],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Folder name in the cache: name, version, content hash."""
        return f"{self.name}-v{self.version}-{self.digest[:12]}"


def _common(architecture: str, model_type: str, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": VOCAB_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def _outer(config: Mapping[str, Any]) -> list[TensorSpec]:
    """Embedding, final norm and head; the head gives logits of standard deviation 1.2."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    return [
        TensorSpec("model.embed_tokens.weight", (vocab, hidden), 1.0),
        TensorSpec("model.norm.weight", (hidden,), 0.1, 1.0),
        TensorSpec("lm_head.weight", (vocab, hidden), 1.2 / sqrt(hidden)),
    ]


def _mlp(prefix: str, hidden: int, inner: int, gain: float) -> list[TensorSpec]:
    """Gated MLP whose output has a standard deviation near ``gain``."""
    return [
        TensorSpec(f"{prefix}.gate_proj.weight", (inner, hidden), 1.4 / sqrt(hidden)),
        TensorSpec(f"{prefix}.up_proj.weight", (inner, hidden), 1.4 / sqrt(hidden)),
        TensorSpec(f"{prefix}.down_proj.weight", (hidden, inner), gain / sqrt(inner)),
    ]


def _norms(prefix: str, hidden: int) -> list[TensorSpec]:
    return [
        TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,), 0.1, 1.0),
        TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,), 0.1, 1.0),
    ]


def _deepseek_tensors(config: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value, kv_rank, q_rank = config["v_head_dim"], config["kv_lora_rank"], config["q_lora_rank"]
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    specs = _outer(config)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        attn = f"{base}.self_attn"
        kv_out = heads * (nope + value)
        specs += _norms(base, hidden)
        specs += [
            TensorSpec(f"{attn}.q_a_proj.weight", (q_rank, hidden), 1.0 / sqrt(hidden)),
            TensorSpec(f"{attn}.q_a_layernorm.weight", (q_rank,), 0.1, 1.0),
            TensorSpec(
                f"{attn}.q_b_proj.weight", (heads * (nope + rope), q_rank), 1.0 / sqrt(q_rank)
            ),
            TensorSpec(
                f"{attn}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), 1.0 / sqrt(hidden)
            ),
            TensorSpec(f"{attn}.kv_a_layernorm.weight", (kv_rank,), 0.1, 1.0),
            TensorSpec(f"{attn}.kv_b_proj.weight", (kv_out, kv_rank), 1.0 / sqrt(kv_rank)),
            TensorSpec(f"{attn}.o_proj.weight", (hidden, heads * value), 1.0 / sqrt(heads * value)),
        ]
        if layer < config["first_k_dense_replace"]:
            specs += _mlp(f"{base}.mlp", hidden, config["intermediate_size"], 1.0)
            continue
        specs += [
            TensorSpec(f"{base}.mlp.gate.weight", (experts, hidden), 1.0 / sqrt(hidden)),
            TensorSpec(f"{base}.mlp.gate.e_score_correction_bias", (experts,), 0.05),
            *_mlp(f"{base}.mlp.shared_experts", hidden, inner * config["n_shared_experts"], 0.5),
        ]
        for expert in range(experts):
            specs += _mlp(f"{base}.mlp.experts.{expert}", hidden, inner, 0.5)
    return tuple(specs)


def _qwen3_tensors(config: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    specs = _outer(config)
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        attn = f"{base}.self_attn"
        specs += _norms(base, hidden)
        specs += [
            TensorSpec(f"{attn}.q_proj.weight", (heads * head, hidden), 1.0 / sqrt(hidden)),
            TensorSpec(f"{attn}.k_proj.weight", (kv_heads * head, hidden), 1.0 / sqrt(hidden)),
            TensorSpec(f"{attn}.v_proj.weight", (kv_heads * head, hidden), 1.0 / sqrt(hidden)),
            TensorSpec(f"{attn}.o_proj.weight", (hidden, heads * head), 1.0 / sqrt(heads * head)),
            # Normed queries and keys: scores have a standard deviation of 1.2 * 1.2.
            TensorSpec(f"{attn}.q_norm.weight", (head,), 0.1, 1.2),
            TensorSpec(f"{attn}.k_norm.weight", (head,), 0.1, 1.2),
            TensorSpec(
                f"{base}.mlp.gate.weight", (config["num_experts"], hidden), 1.0 / sqrt(hidden)
            ),
        ]
        for expert in range(config["num_experts"]):
            prefix = f"{base}.mlp.experts.{expert}"
            specs += _mlp(prefix, hidden, config["moe_intermediate_size"], 1.0)
    return tuple(specs)


def _deepseek_config(dtype: str, **sizes: int) -> dict[str, Any]:
    """DeepSeek-V3 at a small size; YaRN, grouped sigmoid routing and biases as the original."""
    return {
        **_common("DeepseekV3ForCausalLM", "deepseek_v3", dtype),
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 64,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
        **sizes,
    }


def _deepseek_v3() -> Recipe:
    """Runs as multi-head attention in fp32; the value head is narrower than the key head."""
    config = _deepseek_config(
        "float32", kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
    )
    return Recipe(
        name="deepseek-v3",
        version=1,
        seed=20250101,
        dtype="float32",
        dtypes=("float32", "bfloat16"),
        config=config,
        tensors=_deepseek_tensors(config),
        environment={"VLLM_MLA_DISABLE": "1"},
    )


def _deepseek_v3_mla() -> Recipe:
    """The latent sizes that CPU MLA kernels are compiled for: 512 + 64."""
    config = _deepseek_config(
        "bfloat16", kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    return Recipe(
        name="deepseek-v3-mla",
        version=1,
        seed=20250102,
        dtype="bfloat16",
        dtypes=("bfloat16",),
        config=config,
        tensors=_deepseek_tensors(config),
        environment={"VLLM_MLA_DISABLE": "0"},
        needs_amx=True,
    )


def _qwen3_moe() -> Recipe:
    """Grouped-query attention with normed heads, softmax routing, every layer sparse."""
    config = {
        **_common("Qwen3MoeForCausalLM", "qwen3_moe", "float32"),
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return Recipe(
        name="qwen3-moe",
        version=1,
        seed=20250103,
        dtype="float32",
        dtypes=("float32", "bfloat16"),
        config=config,
        tensors=_qwen3_tensors(config),
    )


RECIPES: Mapping[str, Recipe] = {
    made.name: made for made in (_deepseek_v3(), _deepseek_v3_mla(), _qwen3_moe())
}


def recipe(name: str) -> Recipe:
    """The built-in recipe ``name``; :class:`UnknownRecipe` lists the known ones."""
    if name not in RECIPES:
        known = ", ".join(sorted(RECIPES))
        raise UnknownRecipe(
            f"model {name!r} is neither a built-in model ({known}) nor a folder; "
            "give one of these names or the path of a local checkpoint"
        )
    return RECIPES[name]
