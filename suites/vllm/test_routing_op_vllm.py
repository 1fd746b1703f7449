"""The routing operator through vLLM: the same operator, its flag where each stack keeps it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from afd_plugin import routing
from afd_plugin.errors import (
    BalancedRoutingInKernel,
    BalancedRoutingWithoutExperts,
    RoutingOpError,
    UnknownProfileFlag,
)
from afd_plugin.ops import OpDefinition, register, take_down
from afd_plugin.routing import (
    ROUTING_OP,
    RoutingRuntime,
    TokenHolders,
    balance_routing_ids_,
    bound_runtime,
    profile_run,
    script_runtime,
)
from afd_testkit.library import OpCase, OpLibrary, assert_op_contract, op_scope

ConfigMaker = Callable[..., Any]
InContext = Callable[..., AbstractContextManager[Any]]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_loaded")]

SCHEMA = (
    "vllm::afd_balance_routing_ids_(Tensor(a0!) topk_ids, SymInt num_experts, "
    "bool force_balance) -> ()"
)


def skewed(tokens: int = 16) -> torch.Tensor:
    """A gate that favours experts 0 and 1."""
    return torch.tensor([[0, 1]], dtype=torch.int32).repeat(tokens, 1)


def is_even(ids: torch.Tensor) -> bool:
    """Of 16 tokens with two experts each, everyone of eight gets four."""
    return Counter(ids.flatten().tolist()) == dict.fromkeys(range(8), 4)


# --- registration -------------------------------------------------------------------------------


def test_name_and_schema_are_the_same_either_way() -> None:
    from afd_plugin.compat.routing import with_vllm

    found = []
    for options in ((), (with_vllm,)):
        with op_scope() as scope:
            op = scope.register(ROUTING_OP, *options)
            found.append((op.name(), str(op._schema)))
            assert op is torch.ops.vllm.afd_balance_routing_ids_.default
    assert found == [("vllm::afd_balance_routing_ids_", SCHEMA)] * 2


def test_through_vllm_it_keeps_its_contract(op_library: OpLibrary) -> None:
    from afd_plugin.compat.routing import with_vllm

    op = op_library.register(ROUTING_OP, with_vllm)
    cases = [
        OpCase("forced", (skewed(7), 8, True)),
        OpCase("forced, int64", (skewed(7).long(), 8, True)),
        OpCase("forced, no rows", (skewed(0), 8, True)),
        OpCase("live", (skewed(7), 8, False)),
    ]
    with bound_runtime(script_runtime()):
        assert_op_contract(op, cases, backends=("aot_eager",))


def test_it_is_registered_for_the_platforms_own_key(op_library: OpLibrary) -> None:
    from vllm.platforms import current_platform

    from afd_plugin.compat.routing import with_vllm

    op_library.register(ROUTING_OP, with_vllm)
    assert current_platform.dispatch_key == "CPU"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [has("vllm::afd_balance_routing_ids_", key) for key in ("CPU", "Meta", "CUDA")] == [
        True,
        True,
        False,
    ]


def test_without_the_fake_vllm_would_register_half_of_it() -> None:
    from afd_plugin.compat.routing import with_vllm

    with pytest.raises(RoutingOpError, match="without a fake kernel"):
        register(replace(ROUTING_OP, fake=None), with_vllm)  # type: ignore[arg-type]
    assert not ROUTING_OP.is_registered


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the process had not registered anything; what the test registers is taken down."""
    own = routing._Process()
    monkeypatch.setattr(routing, "_process", own)
    yield
    if own.library is not None:
        take_down(own.library)


@pytest.mark.usefixtures("process")
def test_a_worker_registers_once_and_again_it_does_nothing(make_config: ConfigMaker) -> None:
    from afd_plugin.compat.routing import register_for

    register_for(make_config("qwen3-moe"))
    first = ROUTING_OP.overload
    register_for(make_config("qwen3-moe"))
    assert ROUTING_OP.overload is first
    assert str(first._schema) == SCHEMA
    ids = skewed()
    balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed())
    with profile_run():
        balance_routing_ids_(ids, 8)
    assert is_even(ids)


@pytest.mark.usefixtures("process")
def test_a_script_before_the_worker_is_the_same_place_on_the_cpu(make_config: ConfigMaker) -> None:
    from afd_plugin.compat.routing import register_for

    routing.register_routing_op()
    register_for(make_config("qwen3-moe"))
    with pytest.raises(RoutingOpError, match=r"context variable in this process; it cannot also"):
        routing.register_routing_op(RoutingRuntime("elsewhere", lambda: True, TokenHolders))


@pytest.mark.usefixtures("process")
def test_what_is_registered_for_another_device_is_not_bound_to(make_config: ConfigMaker) -> None:
    """As a process of two stacks would find it: complete, but not for where the model computes."""
    from afd_plugin.compat.routing import register_for

    def for_the_accelerator(definition: OpDefinition, library: torch.library.Library) -> None:
        library.define(definition.schema.removeprefix("vllm::"))
        torch.library.register_fake(definition.qualified_name, definition.fake, lib=library)
        library.impl(definition.name, definition.kernel, "PrivateUse1")

    foreign = register(ROUTING_OP, for_the_accelerator)
    try:
        with pytest.raises(RoutingOpError, match="PrivateUse1, and cannot be called on CPU"):
            register_for(make_config("qwen3-moe"))
        assert routing._process.runtime is None
    finally:
        take_down(foreign)


# --- which stack --------------------------------------------------------------------------------


def on_platform(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    from afd_plugin.compat import routing as compat

    monkeypatch.setattr(compat, "current_platform", SimpleNamespace(device_type=device_type))


@pytest.mark.parametrize(
    ("platform", "second_runner", "place"),
    [
        ("cpu", False, "context variable"),
        ("npu", False, "forward context"),
        ("npu", True, "forward context's kwargs"),
    ],
)
def test_each_known_stack_has_its_place(
    make_config: ConfigMaker,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    second_runner: bool,
    place: str,
) -> None:
    from afd_plugin.compat.routing import runtime_of

    config = make_config("qwen3-moe")
    on_platform(monkeypatch, platform)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(second_runner)))
    runtime = runtime_of(config)
    assert runtime.name == place
    assert runtime.ranks() == TokenHolders(0, 1, 1)  # neither DP nor EP: no group is asked


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("platform", ["cuda", "rocm", "xpu", "tpu", ""])
def test_any_other_stack_is_refused(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    from afd_plugin.compat.routing import register_for

    config = make_config("qwen3-moe")
    on_platform(monkeypatch, platform)
    with pytest.raises(UnknownProfileFlag) as caught:
        register_for(config)
    assert str(caught.value).startswith(f"the platform is {platform!r}")
    assert "allowed: 'cpu' (vLLM 0.32.0) or 'npu'" in str(caught.value)
    assert not ROUTING_OP.is_registered
    assert routing._process.runtime is None


# --- the flag -----------------------------------------------------------------------------------


@pytest.fixture
def in_context(make_config: ConfigMaker, op_library: OpLibrary) -> InContext:
    """``with in_context(additional_kwargs)``: inside a forward pass, as a runner enters it."""
    from vllm.forward_context import create_forward_context, override_forward_context

    from afd_plugin.compat.routing import with_vllm

    config = make_config("qwen3-moe")
    op_library.register(ROUTING_OP, with_vllm)

    @contextmanager
    def enter(additional_kwargs: dict[str, Any] | None = None) -> Iterator[Any]:
        context = create_forward_context({}, config, additional_kwargs=additional_kwargs)
        with override_forward_context(context):
            yield context

    return enter


@contextmanager
def reading(place: str) -> Iterator[None]:
    """The operator reads its flag in one of the two places of vLLM-Ascend."""
    from afd_plugin.compat import routing as compat

    flag = {"attribute": compat.flag_of_context, "kwargs": compat.flag_of_additional_kwargs}[place]
    with bound_runtime(RoutingRuntime(place, flag, TokenHolders)):
        yield


def balances() -> bool:
    ids = skewed()
    balance_routing_ids_(ids, 8)
    assert is_even(ids) or torch.equal(ids, skewed())
    return is_even(ids)


@pytest.mark.parametrize("place", ["attribute", "kwargs"])
def test_the_flag_is_read_at_each_call(in_context: InContext, place: str) -> None:
    with reading(place), in_context() as context:
        found = []
        for profiling in (True, False, True):
            if place == "attribute":
                context.in_profile_run = profiling
            else:
                context.additional_kwargs["in_profile_run"] = profiling
            found.append(balances())
    assert found == [True, False, True]


@pytest.mark.parametrize("place", ["attribute", "kwargs"])
def test_each_context_has_its_own_flag(in_context: InContext, place: str) -> None:
    def flagged(profiling: bool) -> AbstractContextManager[Any]:
        return in_context({"in_profile_run": profiling})

    with reading(place), flagged(True) as outer:
        outer.in_profile_run = True
        assert balances()
        with flagged(False) as inner:
            inner.in_profile_run = False
            assert not balances()
        assert balances()


@pytest.mark.parametrize(
    ("place", "other", "said"),
    [("attribute", "kwargs", "attributes"), ("kwargs", "attribute", "additional_kwargs")],
)
def test_a_flag_that_is_missing_is_not_guessed(
    in_context: InContext, place: str, other: str, said: str
) -> None:
    """Not even from where the other runner keeps it, nor if balance is forced by someone else."""
    kwargs = {"in_profile_run": True} if other == "kwargs" else {"something": 1}
    ids = skewed()
    with reading(place), in_context(kwargs) as context:
        if other == "attribute":
            context.in_profile_run = True
        with pytest.raises(RoutingOpError, match=f"no in_profile_run in its {said}.*afd-testkit"):
            balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed())


@pytest.mark.parametrize("flag", [None, 1, 0, "yes", torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("place", ["attribute", "kwargs"])
def test_a_flag_of_another_kind_is_not_taken_for_one(
    in_context: InContext, place: str, flag: Any
) -> None:
    ids = skewed()
    with reading(place), in_context({"in_profile_run": flag}) as context:
        context.in_profile_run = flag
        with pytest.raises(RoutingOpError, match=f"in the {place}; it must be True or False"):
            balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed())


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("place", ["attribute", "kwargs"])
def test_outside_of_a_forward_pass(place: str) -> None:
    with reading(place), pytest.raises(RoutingOpError, match="outside of a forward pass"):
        balance_routing_ids_(skewed(), 8)


@pytest.mark.parametrize("place", ["attribute", "kwargs"])
def test_the_forward_context_is_seen_from_every_thread(in_context: InContext, place: str) -> None:
    """It is a global of vLLM's module; the context variable is not, and is carried or set there."""
    found: list[bool] = []
    with reading(place), in_context({"in_profile_run": True}) as context:
        context.in_profile_run = True
        thread = threading.Thread(target=lambda: found.append(balances()))
        thread.start()
        thread.join()
    with bound_runtime(script_runtime()), profile_run():
        for run in (lambda call: call(), copy_context().run):
            thread = threading.Thread(target=run, args=(lambda: found.append(balances()),))
            thread.start()
            thread.join()
    assert found == [True, False, True]


# --- through vLLM's routers ---------------------------------------------------------------------


@pytest.fixture
def router(in_context: InContext) -> Any:
    """vLLM's own, for eight experts of which each token goes to two."""
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

    return create_fused_moe_router(top_k=2, global_num_experts=8)


def route(router: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and weights."""
    weights, ids = router.select_experts(torch.zeros(len(logits), 4), logits)
    return ids, weights


def runner_of(router: Any, *, monolithic: bool = False) -> Any:
    """What is asked of a layer's ``MoERunner``."""
    kind = type("OfThisTest", (), {"is_monolithic": monolithic})
    return SimpleNamespace(router=router, routed_experts=SimpleNamespace(quant_method=kind()))


@pytest.mark.parametrize("force", [False, True])
def test_ids_of_a_router_pass_through_the_operator(
    router: Any, in_context: InContext, force: bool
) -> None:
    """Its own ids first seen by whoever listened before; weights are the router's either way."""
    from afd_plugin.compat.routing import route_through_op

    logits = torch.linspace(3.0, -3.0, 8).repeat(16, 1)  # experts 0 and 1 for every token
    before, weights_before = route(router, logits)
    assert sorted(before[0].tolist()) == [0, 1]
    heard: list[torch.Tensor] = []
    router.set_capture_fn(lambda ids: heard.append(ids.clone()))
    with reading("attribute"), in_context() as context:
        context.in_profile_run = False
        route_through_op([runner_of(router)], force_balance=force)
        live, weights = route(router, logits)
        assert torch.equal(weights, weights_before)
        assert is_even(live) if force else torch.equal(live, before)
        context.in_profile_run = True
        profiled, weights = route(router, logits)
        assert is_even(profiled)
        assert torch.equal(weights, weights_before)
    assert len(heard) == 2
    assert all(torch.equal(ids, before) for ids in heard)


def test_a_model_is_not_wired_before_the_operator_is_there() -> None:
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

    from afd_plugin.compat.routing import route_through_op

    router = create_fused_moe_router(top_k=2, global_num_experts=8)
    with pytest.raises(RoutingOpError, match="not registered"):
        route_through_op([runner_of(router)], force_balance=False)
    assert router.capture_fn is None


def test_what_is_wired_says_when_the_operator_is_gone() -> None:
    """torch's own handle would crash the process; and what is registered again is called."""
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

    from afd_plugin.compat.routing import route_through_op, with_vllm

    router = create_fused_moe_router(top_k=2, global_num_experts=8)
    logits = torch.linspace(3.0, -3.0, 8).repeat(16, 1)
    with bound_runtime(script_runtime()):
        with op_scope() as scope:
            scope.register(ROUTING_OP, with_vllm)
            route_through_op([runner_of(router)], force_balance=True)
            assert is_even(route(router, logits)[0])
        with pytest.raises(RoutingOpError, match="not registered"):
            route(router, logits)
        with op_scope() as scope:
            scope.register(ROUTING_OP, with_vllm)
            assert is_even(route(router, logits)[0])


# --- balance that nothing would read ------------------------------------------------------------


def test_forced_balance_of_a_model_without_experts_is_refused() -> None:
    from afd_plugin.compat.routing import route_through_op

    route_through_op([], force_balance=False)
    with pytest.raises(BalancedRoutingWithoutExperts) as caught:
        route_through_op(iter([]), force_balance=True)
    assert str(caught.value) == (
        "the model's number of layers with routed experts is 0, which force_balanced_routing does "
        "not support; allowed: 1 or more. Serve a model with routed experts. "
        "Or leave force_balanced_routing off."
    )


def test_forced_balance_of_kernels_that_route_by_themselves_is_refused(
    router: Any, in_context: InContext
) -> None:
    """One such layer is enough; no layer is wired then."""
    from afd_plugin.compat.routing import route_through_op

    runners = [runner_of(router), runner_of(router, monolithic=True)]
    with pytest.raises(BalancedRoutingInKernel) as caught:
        route_through_op(runners, force_balance=True)
    said = "the experts' kernel is 'OfThisTest', which force_balanced_routing does not support"
    assert str(caught.value).startswith(said)
    assert router.capture_fn is None
    route_through_op(runners, force_balance=False)
    assert router.capture_fn is not None
