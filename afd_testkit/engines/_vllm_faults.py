"""What a fault may touch of a real engine: its decoder layers and its expert routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any

import torch


class VllmFaultTarget(AbstractContextManager["VllmFaultTarget"]):
    """A :class:`~afd_testkit.faults.FaultTarget`; what it had to put in place goes at the end."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._undo = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def decoder_layers(self) -> Sequence[torch.nn.Module]:
        """Decoder layers in order, called with (positions, hidden_states, residual, ...)."""
        return list(self._runner.model.model.layers)

    def moe_routers(self) -> Sequence[Any]:
        """The objects whose ``select_experts`` routes each sparse layer, in layer order."""
        from vllm.platforms import current_platform

        layers = list(self._runner.compilation_config.static_forward_context.values())
        if current_platform.device_type == "npu":
            return self._ascend_routers(layers)
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        return [layer.router for layer in layers if isinstance(layer, MoERunner)]

    def _ascend_routers(self, layers: list[Any]) -> list[Any]:
        """vLLM-Ascend routes all layers with one function of a module; here each has its own."""
        from vllm_ascend.ops.fused_moe import fused_moe
        from vllm_ascend.ops.fused_moe.fused_moe import AscendFusedMoE

        dispatch = _ByLayer(fused_moe)
        self._undo.callback(dispatch.remove)
        return [dispatch.add(layer) for layer in layers if isinstance(layer, AscendFusedMoE)]


class LayerRouter:
    """The routing of one layer: ``select_experts`` may be replaced."""

    def __init__(self, select_experts: Callable[..., Any]) -> None:
        self.select_experts = select_experts


class _ByLayer:
    """Sends a module's ``select_experts`` to the router of the layer whose method is called."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._original: Callable[..., Any] = module.select_experts
        self._current = LayerRouter(self._original)
        self._undo = ExitStack()
        module.select_experts = self._route  # type: ignore[attr-defined]

    def add(self, layer: Any) -> LayerRouter:
        """A router for ``layer``, in force while its quantization method is applied."""
        router = LayerRouter(self._original)
        method = layer.quant_method
        apply = method.apply

        def applied(*args: Any, **kwargs: Any) -> Any:
            self._current = router
            return apply(*args, **kwargs)

        method.apply = applied
        self._undo.callback(delattr, method, "apply")
        return router

    def remove(self) -> None:
        """Everything is as it was."""
        self._undo.close()
        self._module.select_experts = self._original  # type: ignore[attr-defined]

    def _route(self, *args: Any, **kwargs: Any) -> Any:
        return self._current.select_experts(*args, **kwargs)
