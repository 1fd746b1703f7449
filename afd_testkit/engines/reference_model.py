"""The reference model: a small mixture-of-experts decoder in float64, weights from a seed.

Layers keep the fused add-and-norm convention of vLLM's Qwen and DeepSeek models: a layer takes
``(hidden_states, residual)`` and returns both, and the sum is formed inside the next
norm.  A splitter has to carry both through its stages, so the oracle has both.

n = rows, H = hidden size, V = vocabulary size throughout.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from afd_testkit.engines.reference_attention import PagedAttention


@dataclass(frozen=True)
class ReferenceModelConfig:
    """Sizes and constants.  The vocabulary covers the 256 byte values and leaves some ids over.

    ``scoring``: how router logits become scores, ``"softmax"`` (Qwen) or ``"sigmoid"`` (DeepSeek).
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    hidden_size: int = 64
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 300
    num_experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 32
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6


class _Weights:
    """Draws frozen float64 parameters from one generator, in order of construction."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> nn.Parameter:
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return nn.Parameter(mean + std * values, requires_grad=False)

    def linear(self, *shape: int, gain: float = 1.0) -> nn.Parameter:
        """[..., out, in]: unit-variance inputs give outputs of standard deviation ``gain``."""
        return self.normal(*shape, std=gain * shape[-1] ** -0.5)


class RMSNorm(nn.Module):  # type: ignore[misc]
    """Root-mean-square norm over the last axis, with the fused residual addition."""

    def __init__(self, size: int, epsilon: float, weights: _Weights) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = weights.normal(size, mean=1.0, std=0.2)

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(normed, total)`` where total = hidden + residual (residual may be absent)."""
        total = hidden_states if residual is None else hidden_states + residual
        scale = (total.square().mean(dim=-1, keepdim=True) + self.epsilon).rsqrt()
        return total * scale * self.weight, total


def rotate(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of [n, heads, d] at absolute ``positions`` [n]; halves are paired."""
    half = heads.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.to(torch.float64)[:, None, None] * frequency
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()),
        dim=-1,
    )


class SelfAttention(nn.Module):  # type: ignore[misc]
    """Projections and rotary positions around the paged attention."""

    def __init__(self, index: int, config: ReferenceModelConfig, weights: _Weights) -> None:
        super().__init__()
        self.index = index
        self.config = config
        hidden, d = config.hidden_size, config.head_dim
        # A gain of 1.5 gives attention scores a deviation of about 2: single keys matter.
        self.query = weights.linear(config.num_heads * d, hidden, gain=1.5)
        self.key = weights.linear(config.num_kv_heads * d, hidden, gain=1.5)
        self.value = weights.linear(config.num_kv_heads * d, hidden)
        self.output = weights.linear(hidden, config.num_heads * d, gain=2.0)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        """[n, H] of normed [n, H]; ``positions`` [n] int64 feed the rotary embedding only."""
        shape = (hidden_states.shape[0], -1, self.config.head_dim)
        query = F.linear(hidden_states, self.query).view(shape)
        key = F.linear(hidden_states, self.key).view(shape)
        value = F.linear(hidden_states, self.value).view(shape)
        theta = self.config.rope_theta
        mixed = attention(
            self.index, rotate(query, positions, theta), rotate(key, positions, theta), value
        )
        return F.linear(mixed.flatten(1), self.output)


class Router:
    """Chooses the experts of each token; a fault may wrap ``select_experts``."""

    def __init__(self, scoring: Literal["softmax", "sigmoid"], top_k: int) -> None:
        self.scoring = scoring
        self.top_k = top_k

    def select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(topk_weights [n, k] float64, topk_ids [n, k] int32)``; each row's weights sum to 1.

        ``hidden_states`` is unused here; the signature is the one of vLLM's routers.
        """
        if self.scoring == "softmax":
            scores = router_logits.softmax(dim=-1)
        else:
            scores = router_logits.sigmoid()
        weights, ids = scores.topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids.to(torch.int32)


class MixtureOfExperts(nn.Module):  # type: ignore[misc]
    """Routed experts plus one shared expert, each a SwiGLU block."""

    def __init__(self, config: ReferenceModelConfig, weights: _Weights) -> None:
        super().__init__()
        experts, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        self.router = Router(config.scoring, config.experts_per_token)
        self.router_weight = weights.linear(experts, hidden, gain=2.0)
        self.expert_gate_up = weights.linear(experts, 2 * size, hidden, gain=1.5)
        self.expert_down = weights.linear(experts, hidden, size, gain=1.5)
        self.shared_gate_up = weights.linear(2 * size, hidden, gain=1.5)
        self.shared_down = weights.linear(hidden, size, gain=1.5)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] of normed [n, H]; every row by itself."""
        topk_weights, topk_ids = self.router.select_experts(
            hidden_states, F.linear(hidden_states, self.router_weight)
        )
        output = _swiglu(hidden_states, self.shared_gate_up, self.shared_down)
        for expert in range(self.expert_down.shape[0]):
            weight = (topk_weights * (topk_ids == expert)).sum(dim=-1)
            rows = weight.nonzero().squeeze(-1)
            chosen = _swiglu(
                hidden_states[rows], self.expert_gate_up[expert], self.expert_down[expert]
            )
            output[rows] += weight[rows, None] * chosen
        return output


def _swiglu(hidden_states: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(hidden_states, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


class DecoderLayer(nn.Module):  # type: ignore[misc]
    """Attention and mixture of experts, each behind a fused add-and-norm."""

    def __init__(self, index: int, config: ReferenceModelConfig, weights: _Weights) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_epsilon, weights)
        self.self_attn = SelfAttention(index, config, weights)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_epsilon, weights)
        self.mlp = MixtureOfExperts(config, weights)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        attention: PagedAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(hidden_states, residual)``, both [n, H]; the first layer gets no residual."""
        normed, residual = self.input_norm(hidden_states, residual)
        hidden_states = self.self_attn(positions, normed, attention)
        normed, residual = self.post_norm(hidden_states, residual)
        return self.mlp(normed), residual


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """torch on one thread inside: the tensors are too small for more, and threads that
    wait for one another on a busy machine cost twenty times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ReferenceModel(nn.Module):  # type: ignore[misc]
    """Embedding, layers, final norm and untied head; equal config and seed, equal weights."""

    def __init__(self, config: ReferenceModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        weights = _Weights(seed)
        self.embedding = weights.normal(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(index, config, weights) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon, weights)
        # A gain of 2 spreads the log-probabilities over several nats.
        self.head = weights.linear(config.vocab_size, config.hidden_size, gain=2.0)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n, H] of token ids [n]."""
        return self.embedding[token_ids]

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        attention: PagedAttention,
    ) -> torch.Tensor:
        """Final hidden states [n, H] (after the last norm) of embedded rows [n, H]."""
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, attention)
        normed, _ = self.norm(hidden_states, residual)
        return normed

    def logprobs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, V] log-probabilities of the next token, from final hidden states [n, H]."""
        return F.linear(hidden_states, self.head).log_softmax(dim=-1)
