"""The routing operator in a vLLM process: registered vLLM's way, its flag read where it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.library import Library
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import get_dp_group, get_ep_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from afd_plugin.errors import (
    BalancedRoutingInKernel,
    BalancedRoutingWithoutExperts,
    RoutingOpError,
    UnknownProfileFlag,
)
from afd_plugin.ops import OpDefinition
from afd_plugin.routing import (
    ROUTING_OP,
    RoutingRuntime,
    TokenHolders,
    register_routing_op,
    script_runtime,
)

_FLAG = "in_profile_run"  # vLLM-Ascend's name for it, in both places


def with_vllm(definition: OpDefinition, library: Library) -> None:
    """Register for the platform's own dispatch key, as vLLM does with its operators."""
    direct_register_custom_op(
        op_name=definition.name,
        op_func=definition.kernel,
        mutates_args=list(definition.mutates),
        fake_impl=definition.fake,
        target_lib=library,
    )


def _context() -> Any:
    if not is_forward_context_available():
        raise RoutingOpError(
            "experts are routed outside of a forward pass, where nothing says whether the model is "
            "being profiled. Run the model inside set_forward_context."
        )
    return get_forward_context()


def _missing(place: str) -> RoutingOpError:
    return RoutingOpError(
        f"the forward context has no {_FLAG} in its {place}, where this stack keeps it. The "
        "installed vLLM-Ascend differs from the pinned one; see afd-testkit drift."
    )


def flag_of_context() -> bool:
    """From an attribute of the forward context: vLLM-Ascend's first model runner.

    As it stands there; the operator refuses what is neither ``True`` nor ``False``.
    """
    context = _context()
    try:
        flag: bool = context.in_profile_run
    except AttributeError as error:
        raise _missing("attributes") from error
    return flag


def flag_of_additional_kwargs() -> bool:
    """From the forward context's ``additional_kwargs``: vLLM-Ascend's Model Runner V2.

    As it stands there, see :func:`flag_of_context`.
    """
    kwargs = _context().additional_kwargs
    if _FLAG not in kwargs:
        raise _missing("additional_kwargs")
    flag: bool = kwargs[_FLAG]
    return flag


def runtime_of(vllm_config: VllmConfig) -> RoutingRuntime:
    """Where the stack that runs ``vllm_config`` says that it profiles.

    Raises :class:`UnknownProfileFlag` for a platform whose place is not known.
    """
    parallel = vllm_config.parallel_config

    def ranks() -> TokenHolders:
        experts = get_ep_group().world_size if parallel.enable_expert_parallel else 1
        if parallel.data_parallel_size == 1:
            return TokenHolders(expert_ranks=experts)
        group = get_dp_group()
        return TokenHolders(group.rank_in_group, group.world_size, experts)

    platform = current_platform.device_type
    if platform == "cpu":  # vLLM itself has no such flag there; AFDCPUModelRunner sets it
        return RoutingRuntime("context variable", script_runtime().in_profile_run, ranks)
    if platform != "npu":
        raise UnknownProfileFlag(platform)
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        return RoutingRuntime("forward context's kwargs", flag_of_additional_kwargs, ranks)
    return RoutingRuntime("forward context", flag_of_context, ranks)


def register_for(vllm_config: VllmConfig) -> None:
    """Register the operator for the stack of this process; once, complete or raising.

    Complete is with a kernel for the device that the platform computes on.  Of an NPU that cannot
    be asked before it is set up, since its tensors need not be dispatched by the key that the
    platform names; there a kernel for some device must do.
    """
    runtime = runtime_of(vllm_config)
    key = current_platform.dispatch_key if current_platform.device_type == "cpu" else None
    register_routing_op(runtime, with_vllm, key)


def route_through_op(runners: Iterable[Any], force_balance: bool) -> None:
    """The ids of every router pass through the operator, before they are mapped to replicas.

    ``runners``: vLLM's ``MoERunner`` of each layer of the loaded model.  The seam is vLLM's own
    capture callback, which sees logical ids inside ``select_experts``; a callback that is already
    there is called first.
    Raises :class:`BalancedRoutingWithoutExperts` or :class:`BalancedRoutingInKernel` where
    ``force_balance`` would balance nothing.
    """
    runners = list(runners)
    if force_balance:
        _check_balanced(runners)
    for router in (runner.router for runner in runners):
        router.set_capture_fn(_hook(router.capture_fn, router.global_num_experts, force_balance))


def _check_balanced(runners: Sequence[Any]) -> None:
    if not runners:
        raise BalancedRoutingWithoutExperts(0)
    methods = [runner.routed_experts.quant_method for runner in runners]
    kernels = {type(method).__name__ for method in methods if method.is_monolithic}
    if kernels:
        raise BalancedRoutingInKernel(", ".join(sorted(kernels)))


def _hook(before: Any, num_experts: int, force_balance: bool) -> Any:
    # Looked up here, since models are compiled with the callback inside: whether an operator is
    # registered cannot be asked in code that the compiler traces.  Elsewhere it is asked at each
    # call, since the overload crashes once the registration is gone.
    traced = ROUTING_OP.overload

    def capture(topk_ids: Any) -> None:
        if before is not None:
            before(topk_ids)
        balance = traced if torch.compiler.is_compiling() else ROUTING_OP.overload
        balance(topk_ids, num_experts, force_balance)

    return capture
