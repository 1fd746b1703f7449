"""vLLM 0.32.0's MoE layers, routed from outside.

The seam is ``_apply_quant_method`` of each :class:`MoERunner` instance: the gate has been asked,
tokens are where they are computed, and what it returns is what the layer adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

from afd_plugin import context
from afd_plugin.context import AttributeSlot
from afd_plugin.errors import RoutingError, UpstreamDrift
from afd_plugin.payload import RoutingPayload
from afd_plugin.remote_experts import AttentionSide, Prepared


class VllmExperts:
    """An :class:`~afd_plugin.remote_experts.ExpertsBackend` over one runner."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        if runner.gate is None or runner._fse_fuse_gate:
            raise UpstreamDrift(
                f"{runner.layer_name} does not hold a gate of its own, so that nobody could route "
                "on the experts' side. Set connector to 'none' for this model."
            )

    @property
    def layer(self) -> str:
        """The runner's name in the model."""
        return str(self.runner.layer_name)

    def route(
        self, activation: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By vLLM's router, which calls the routing operator.

        Its grouped top-k cannot be asked about no rows: there the operator is called alone.
        """
        method = self.runner.routed_experts.quant_method
        if method.is_monolithic:
            raise RoutingError(
                f"{self.layer}: the kernel of {type(method).__name__} routes by itself and takes "
                "no routing. Set connector to 'none'."
            )
        if activation.shape[0] == 0:
            return self._no_rows(activation.device, method.topk_indices_dtype or torch.int32)
        if logits is None:
            logits, _ = self.runner.gate(activation)
        weights, ids = self.runner.router.select_experts(
            hidden_states=activation,
            router_logits=logits,
            topk_indices_dtype=method.topk_indices_dtype,
            input_ids=None,
        )
        return weights, ids

    def _no_rows(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([0, K] weights, [0, K] ids), seen by whoever sees the router's ids."""
        router = self.runner.router
        ids = torch.empty(0, router.top_k, dtype=dtype, device=device)
        if router.capture_fn is not None:
            router.capture_fn(ids)
        return torch.empty(0, router.top_k, dtype=torch.float32, device=device), ids

    def shared(self, activation: torch.Tensor) -> torch.Tensor | None:
        """By vLLM's own object; its slot is emptied at once, whatever fails later."""
        shared = self.runner.shared_experts
        if shared is None:
            return None
        self.runner._maybe_apply_shared_experts(activation, SharedExpertsOrder.NO_OVERLAP)
        output: torch.Tensor = shared.output
        return output

    def scopes(self, activation: torch.Tensor) -> Sequence[AbstractContextManager[Any]]:
        """The experts' side sees no attention metadata, as where it runs by itself."""
        return [context.replaced(AttributeSlot(get_forward_context(), "attn_metadata"), None)]

    def prepare(self, activation: torch.Tensor, routing: RoutingPayload) -> Prepared:
        """On one rank every row is where its experts are."""
        return Prepared(activation, routing)

    def experts(self, prepared: Prepared) -> torch.Tensor:
        """By vLLM's kernel, with this routing."""
        method = self.runner.routed_experts.quant_method
        wanted = method.topk_indices_dtype
        routing = prepared.routing
        output: torch.Tensor = self.runner.routed_experts.forward_modular(
            x=prepared.activation,
            topk_weights=routing.weights,
            topk_ids=routing.ids if wanted is None else routing.ids.to(wanted),
            shared_experts=None,
            shared_experts_input=None,
        )
        return output

    def finalize(self, output: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        """On one rank there is nothing to bring back."""
        return output


def backends_of(layers: Iterable[Any]) -> Iterator[VllmExperts]:
    """One for each MoE layer among ``layers`` (``static_forward_context``'s values)."""
    return (VllmExperts(layer) for layer in layers if isinstance(layer, MoERunner))


def seam(side: AttentionSide) -> tuple[object, str, Callable[..., Any]]:
    """Where a layer of vLLM is entered; see :func:`~afd_plugin.remote_experts.remote`."""
    backend = side.backend
    if not isinstance(backend, VllmExperts):
        raise RoutingError(f"{type(backend).__name__} is no layer of vLLM's. Use backends_of here.")

    def apply(
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
        shared_experts_overlapping: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        other = shared_experts_input is not None and shared_experts_input is not hidden_states
        if shared_experts_overlapping or other:
            raise RoutingError(
                f"{side.backend.layer}: shared experts run in a stream of their own, or on an "
                "input of their own; with a connector they do not. Set connector to 'none'."
            )
        return side(hidden_states, router_logits)

    return backend.runner, "_apply_quant_method", apply
