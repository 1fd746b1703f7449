"""vLLM-Ascend 0.23.0.post1's MoE layers, routed from outside.

The seam is ``forward_impl`` of each :class:`AscendFusedMoE` instance (``shared_forward_impl``
where it has shared experts).  Natively rows travel with their logits and each rank routes what
arrives; here the routing itself travels in the logits' place, so that it follows its rows
through padding, slicing and gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm_ascend import ascend_forward_context as ascend_context
from vllm_ascend.ops.fused_moe import fused_moe, moe_comm_method, moe_runtime_args
from vllm_ascend.quantization.methods.base import get_moe_num_logical_experts
from vllm_ascend.quantization.quant_type import QuantType

from afd_plugin import context
from afd_plugin.context import AttributeSlot
from afd_plugin.errors import FusedCommunication, RoutingError
from afd_plugin.payload import RoutingPayload, as_rows, from_rows
from afd_plugin.remote_experts import AttentionSide, Prepared
from afd_plugin.routing import balance_routing_ids_


class AscendExperts:
    """An :class:`~afd_plugin.remote_experts.ExpertsBackend` over one fused MoE layer."""

    def __init__(self, moe: Any, *, force_balance: bool) -> None:
        self.moe = moe
        self._force_balance = force_balance

    @property
    def layer(self) -> str:
        """The layer's name in the model."""
        return str(self.moe.layer_name)

    @property
    def num_experts(self) -> int:
        """Logical experts, as the native path counts them."""
        moe = self.moe
        return int(
            get_moe_num_logical_experts(
                moe,
                moe.moe_config.num_experts,
                global_redundant_expert_num=moe.global_redundant_expert_num,
                num_shared_experts=moe.n_shared_experts or 0,
            )
        )

    def logits(self, activation: torch.Tensor) -> torch.Tensor:
        """[R, E] by the layer's gate, computed as natively."""
        if self.moe.is_internal_router:
            return torch.nn.functional.linear(activation.float(), self.moe.gate.weight_fp32)
        logits: torch.Tensor = self.moe._gate(activation)[0]
        return logits

    def route(
        self, activation: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By vLLM-Ascend's selection with the layer's own parameters, then the operator."""
        moe = self.moe
        if logits is None or moe.is_internal_router:
            logits = self.logits(activation)
        weights, ids = fused_moe.select_experts(
            hidden_states=activation,
            router_logits=logits,
            top_k=moe.top_k,
            use_grouped_topk=moe.use_grouped_topk,
            renormalize=moe.renormalize,
            topk_group=moe.topk_group,
            num_expert_group=moe.num_expert_group,
            custom_routing_function=moe.custom_routing_function,
            scoring_func=moe.scoring_func,
            routed_scaling_factor=moe._original_routed_scaling_factor,
            e_score_correction_bias=moe.e_score_correction_bias,
            num_experts=self.num_experts,
            input_ids=None,
            tid2eid=moe.tid2eid,
        )
        ids = ids.to(torch.int32)
        balance_routing_ids_(ids, self.num_experts, self._force_balance)
        return weights, ids

    def shared(self, activation: torch.Tensor) -> torch.Tensor | None:
        """By vLLM-Ascend's own function, on the stream of the layer."""
        if self.moe._shared_experts is None:
            return None
        ready = torch.npu.current_stream().record_event()
        output: torch.Tensor = self.moe._forward_shared_experts(
            activation, fused_moe.FusedMoEEvents(before_routed_experts=ready)
        )
        return output

    def scopes(self, activation: torch.Tensor) -> Sequence[AbstractContextManager[Any]]:
        """The communication that vLLM-Ascend selects for these tokens, and no attention metadata.

        Raises :class:`FusedCommunication` for a method that takes no routing.
        """
        parent = get_forward_context()
        # Ranks that gather from each other must choose alike: by the longest of them.
        parallel = self.moe.moe_config.dp_size > 1
        tokens = parent.max_tokens_across_dp if parallel else activation.shape[0]
        kind = ascend_context.select_moe_comm_method(int(tokens), self.moe.vllm_config)
        if kind is ascend_context.MoECommType.FUSED_MC2:
            raise FusedCommunication(kind.name)
        return [
            context.replaced(AttributeSlot(parent, "attn_metadata"), None),
            context.replaced(AttributeSlot(parent, "moe_comm_type"), kind),
            context.replaced(
                AttributeSlot(parent, "moe_comm_method"), moe_comm_method.get_moe_comm_method(kind)
            ),
        ]

    def prepare(self, activation: torch.Tensor, routing: RoutingPayload) -> Prepared:
        """Padded, sliced and gathered natively, the routing in the place of the logits."""
        parent = get_forward_context()
        done = parent.moe_comm_method.prepare(
            hidden_states=activation,
            router_logits=as_rows(routing, self.num_experts),
            replace_allreduce=parent.flash_comm_v1_enabled,
            enable_shared_expert_dp=self.moe.enable_shared_expert_dp,
            quant_type=QuantType.NONE,
        )
        return Prepared(done.hidden_states, from_rows(done.router_logits, self.num_experts), done)

    def experts(self, prepared: Prepared) -> torch.Tensor:
        """By vLLM-Ascend's dispatch, grouped products and combine, with this routing."""
        moe, done, x = self.moe, prepared.rest, prepared.activation
        method = moe.quant_method
        result = get_forward_context().moe_comm_method.fused_experts(
            moe_runtime_args.build_fused_experts_input(
                hidden_states=x,
                topk_weights=prepared.routing.weights.to(x.dtype),
                topk_ids=prepared.routing.ids,
                w1=moe.w13_weight,
                w2=moe.w2_weight,
                w1_bias=moe.w13_bias if method.moe.has_bias else None,
                w2_bias=moe.w2_bias if method.moe.has_bias else None,
                quant_type=QuantType.NONE,
                dynamic_eplb=method.dynamic_eplb,
                expert_map=moe._expert_map,
                global_redundant_expert_num=moe.global_redundant_expert_num,
                mc2_mask=done.mc2_mask,
                apply_router_weight_on_input=moe.apply_router_weight_on_input,
                log2phy=moe.log2phy,
                pertoken_scale=done.pertoken_scale,
                activation=moe.activation,
                swiglu_limit=moe.swiglu_limit,
            )
        )
        output: torch.Tensor = result.routed_out
        return output

    def finalize(self, output: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        """Summed, scattered and cut back natively."""
        method = get_forward_context().moe_comm_method
        rows: torch.Tensor = method.finalize(
            hidden_states=output,
            reduce_results=isinstance(method, moe_comm_method.AllGatherCommImpl),
            padded_hidden_states_shape=prepared.rest.padded_hidden_states_shape,
        )
        return rows


def backends_of(layers: Iterable[Any], *, force_balance: bool) -> Iterator[AscendExperts]:
    """One for each MoE layer among ``layers`` (``static_forward_context``'s values)."""
    return (
        AscendExperts(layer, force_balance=force_balance)
        for layer in layers
        if isinstance(layer, fused_moe.AscendFusedMoE)
    )


def seam(side: AttentionSide) -> tuple[object, str, Callable[..., Any]]:
    """Where a layer of vLLM-Ascend is entered; see :func:`~afd_plugin.remote_experts.remote`."""
    backend = side.backend
    if not isinstance(backend, AscendExperts):
        raise RoutingError(
            f"{type(backend).__name__} is no layer of vLLM-Ascend's. Use backends_of here."
        )

    def routed(hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return side(hidden_states, router_logits)[1]

    def both(
        hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return side(hidden_states, router_logits)

    moe = backend.moe
    if moe._shared_experts is None:
        return moe, "forward_impl", routed
    return moe, "shared_forward_impl", both
