"""What the small model is and how it is trained: all that determines a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The one size that kernels for latent attention take: latent and rotary values.
LATENT, ROTARY = 512, 64


@dataclass(frozen=True)
class Phase:
    """Part of a training: ``steps`` of ``batch`` sequences of ``tokens`` each."""

    steps: int
    tokens: int
    batch: int


@dataclass(frozen=True)
class Recipe:
    """Seeds, amounts and rates.

    Short sequences first, where most is learnt at a third of the cost; then ones that hold five
    examples and a question, which is what the task asks.  ``drills``: share of examples that are
    bare arithmetic.  ``hard``: share with numbers up to 999.  ``result_weight``: of digits of
    results in the loss, other answer tokens count 1.  ``routing_step``: of the routing bias
    towards less loaded experts, each optimizer step; small, so that load stays uneven.
    """

    seed: int = 1
    phases: tuple[Phase, ...] = (Phase(1800, 128, 48), Phase(700, 512, 12))
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warm_up: float = 0.02
    drills: float = 0.5
    hard: float = 0.2
    result_weight: float = 3.0
    routing_step: float = 1e-3

    @property
    def steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)


def architecture(vocabulary: int) -> dict[str, Any]:
    """The model's config.json: every part of DeepSeek-V3, small."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        # As wide as the latent-attention kernels want it: rotation frequencies depend on it.
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
