"""The routing operator on vLLM-Ascend: its flag as the two model runners really set it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from afd_plugin import routing
from afd_plugin.errors import RoutingOpError
from afd_plugin.ops import take_down
from afd_plugin.routing import (
    ROUTING_OP,
    RoutingRuntime,
    TokenHolders,
    balance_routing_ids_,
    script_runtime,
)

ConfigMaker = Callable[..., Any]
InForce = Callable[[Any], AbstractContextManager[None]]

pytestmark = [pytest.mark.ascend, pytest.mark.usefixtures("ascend_loaded")]

SCHEMA = (
    "vllm::afd_balance_routing_ids_(Tensor(a0!) topk_ids, SymInt num_experts, "
    "bool force_balance) -> ()"
)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the process had not registered anything; what the test registers is taken down."""
    own = routing._Process()
    monkeypatch.setattr(routing, "_process", own)
    yield
    if own.library is not None:
        take_down(own.library)


@pytest.fixture
def groups(make_config: ConfigMaker, in_force: InForce, tmp_path: Path) -> Iterator[Any]:
    """One rank with vLLM's and vLLM-Ascend's groups, which forward contexts ask; its config."""
    from vllm.distributed import parallel_state
    from vllm_ascend.distributed import parallel_state as ascend_state

    config = make_config("qwen3-moe")
    with in_force(config):
        try:
            parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "hccl")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            ascend_state.init_ascend_model_parallel(config.parallel_config)
            yield config
        finally:
            ascend_state.destroy_ascend_model_parallel()
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def balances() -> bool:
    """Whether 16 tokens that all want experts 0 and 1 of eight come out evenly spread."""
    skewed = torch.tensor([[0, 1]], dtype=torch.int32, device="npu").repeat(16, 1)
    ids = skewed.clone()
    balance_routing_ids_(ids, 8)
    even = Counter(ids.flatten().tolist()) == dict.fromkeys(range(8), 4)
    assert even or torch.equal(ids, skewed)
    return even


@pytest.mark.usefixtures("process")
def test_registered_as_a_worker_does(make_config: ConfigMaker) -> None:
    from afd_plugin.compat.routing import register_for

    config = make_config("qwen3-moe")
    register_for(config)
    first = ROUTING_OP.overload
    register_for(config)
    assert ROUTING_OP.overload is first
    assert str(first._schema) == SCHEMA
    assert routing._process.runtime is not None
    assert routing._process.runtime.name == "forward context"
    with pytest.raises(RoutingOpError, match="from the forward context in this process"):
        routing.register_routing_op(script_runtime())
    with pytest.raises(RoutingOpError, match="outside of a forward pass"):
        balances()


@pytest.mark.usefixtures("process")
def test_the_first_runner_keeps_it_in_an_attribute(groups: Any) -> None:
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context

    from afd_plugin.compat.routing import register_for

    register_for(groups)
    found = []
    for profiling in (True, False, True):
        with set_ascend_forward_context(None, groups, 16, in_profile_run=profiling):
            found.append(balances())
    assert found == [True, False, True]


@pytest.mark.usefixtures("process")
def test_the_second_runner_keeps_it_in_additional_kwargs(
    groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.forward_context import set_forward_context
    from vllm_ascend.ascend_forward_context import override_mrv2_in_profile_run

    from afd_plugin.compat.routing import flag_of_additional_kwargs, register_for

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    register_for(groups)
    assert routing._process.runtime == RoutingRuntime(
        "forward context's kwargs", flag_of_additional_kwargs, TokenHolders
    )
    with set_forward_context(None, groups, 16):
        found = [balances()]
    with override_mrv2_in_profile_run(True), set_forward_context(None, groups, 16):
        found.append(balances())
    with set_forward_context(None, groups, 16):
        found.append(balances())
    assert found == [False, True, False]


@pytest.mark.usefixtures("process")
def test_a_context_of_the_other_runner_is_refused(
    groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag of one runner is never read as the other's default."""
    from vllm.forward_context import set_forward_context
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context

    from afd_plugin.compat.routing import flag_of_additional_kwargs, register_for

    register_for(groups)
    with (
        set_forward_context(None, groups, 16),
        pytest.raises(RoutingOpError, match="no in_profile_run in its attributes"),
    ):
        balances()
    with (
        set_ascend_forward_context(None, groups, 16, in_profile_run=True),
        pytest.raises(RoutingOpError, match="no in_profile_run in its additional_kwargs"),
    ):
        flag_of_additional_kwargs()
