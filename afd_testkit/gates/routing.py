"""Gate ``routing``: expert ids are balanced while the model is profiled, else the router's own.

Invariant: a model that was compiled while it was profiled follows the flag afterwards, with what
was compiled then.  Oracles: for a gated layer by itself, top-k of exact logits; for a model, the
expert ids of the same worker run eagerly and the results of the stock worker; for balanced ids
their definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afd_testkit.device_evidence import FACT
from afd_testkit.engines.base import (
    IdArray,
    PrefillEngine,
    Prompt,
    RoutingSetting,
    RunResult,
    SplitSetting,
)
from afd_testkit.forced_balance import (
    BALANCED,
    DROPPED,
    ENGINE,
    GATE,
    ID_DTYPES,
    KEPT,
    PROFILING,
    layer_variant,
)
from afd_testkit.gates.check import Check, NotApplicable, run_check
from afd_testkit.gates.routing_child import Answer, Guards, Order, ask
from afd_testkit.gates.routing_ids import chosen_ids, experts_of, gated_inputs, why_uneven
from afd_testkit.gates.session import Baseline, GateSession, Subject, salted
from afd_testkit.results import CheckResult

NAME = GATE
# Input and profile flag of each call through one callable; the first one compiles.
_CALLS = ((0, True), (0, False), (1, False), (1, True), (0, False))
_GUARDS: Mapping[str, Guards] = {KEPT: "kept", DROPPED: "dropped"}
_LENGTHS = ((5, 90, 17, 48), (64, 3, 31))
_OFF = SplitSetting("off")
_NATURAL = "natural_routing"


def cases(session: GateSession) -> list[str]:
    """A gated layer, compiled with guards kept and dropped; and a whole model."""
    return [KEPT, DROPPED, ENGINE]


def applies(subject: Subject) -> bool:
    """Routing by itself does not depend on ranks: subjects of one process show it."""
    return subject.topology.ranks == 1


def case_applies(subject: Subject, case: str) -> bool:
    """A layer runs wherever torch does; whole models are compiled on vLLM's CPU engine.

    In float32: in bfloat16 compiled code rounds elsewhere than eager code, and a router whose
    logits are a rounding apart then has other experts, without any fault.
    """
    return case != ENGINE or (subject.engine == "vllm-cpu" and subject.dtype == "float32")


def run(session: GateSession, subject: Subject, case: str) -> Iterator[CheckResult]:
    """The checks of one case."""
    if case == ENGINE:
        yield from _model(session, subject, case)
        return
    answers: dict[str, Answer] = {}
    for dtype in ID_DTYPES:

        def body(check: Check, dtype: str = dtype) -> None:
            check.judging = True
            environment = _environment(check)
            if not answers:  # one process for all of them
                orders = [_order(check, case, each) for each in ID_DTYPES]
                answers.update(zip(ID_DTYPES, ask(orders, environment), strict=True))
            _judge_layer(check, answers[dtype])

        yield run_check(session, NAME, subject, case, layer_variant(dtype), body)


def _order(check: Check, case: str, dtype: str) -> Order:
    """A gated layer, compiled in its first call, which is made while profiling."""
    given = gated_inputs()
    return Order(
        gate=given.gate.tolist(),
        inputs=[rows.tolist() for rows in given.inputs],
        calls=_CALLS,
        top_k=given.top_k,
        id_dtype=dtype,
        guards=_GUARDS[case],
        dtype=check.subject.dtype,
        device="npu" if check.subject.engine == "ascend" else "cpu",
        fault=check.session.fault,
    )


def _judge_layer(check: Check, answer: Answer) -> None:
    """Every call gave the ids that it must, all through one compiled graph."""
    given = gated_inputs()
    for index, rows in enumerate(given.inputs):
        uneven = why_uneven(given.natural(index), given.num_experts)
        check.need(bool(uneven), f"input {index} of {len(rows)} tokens must be unbalanced itself")
    profiled = sum(profiling for _, profiling in _CALLS)
    check.facts |= {BALANCED: answer.balanced, _NATURAL: answer.natural}
    check.facts["compilations"] = len(answer.graphs)
    check.need(
        not answer.contract, f"the registered operator breaks its contract:\n{answer.contract}"
    )
    for number, ((index, profiling), ids) in enumerate(zip(_CALLS, answer.ids, strict=True)):
        where = f"call {number} ({'profiling' if profiling else 'serving'}, input {index})"
        found = np.array(ids, dtype=np.int64)
        if profiling:
            uneven = why_uneven(found, given.num_experts)
            check.need(not uneven, f"{where}: {uneven}")
        else:
            _need_same(check, where, found, given.natural(index))
    _need_one_graph(check, answer)
    check.need(
        (answer.balanced, answer.natural) == (profiled, len(_CALLS) - profiled),
        f"{profiled} calls of {len(_CALLS)} were made while profiling; the operator counts "
        f"{answer.balanced} balanced and {answer.natural} natural executions",
    )


def _need_one_graph(check: Check, answer: Answer) -> None:
    """One compilation, with matrix product, top-k and the operator in its graph."""
    check.need(
        len(answer.graphs) == 1,
        f"{len(answer.graphs)} compilations for {len(_CALLS)} calls; there must be one",
    )
    for graph in answer.graphs:
        for what in ("matmul", "topk", answer.operator):
            check.need(
                any(what in name for name in graph),
                f"{what} is not in the compiled region, which holds {', '.join(graph)}",
            )


def _need_same(check: Check, where: str, found: IdArray, expected: IdArray) -> None:
    """The same ids, to the bit."""
    check.need(
        found.shape == expected.shape, f"{where}: ids {found.shape} instead of {expected.shape}"
    )
    wrong = np.argwhere(found != expected)
    if len(wrong):
        token = int(wrong[0][0])
        check.need(
            False,
            f"{where}: {len(wrong)} of {expected.size} ids are not the router's own, first in row "
            f"{token}: {found[token].tolist()} instead of {expected[token].tolist()}",
        )


def _environment(check: Check) -> dict[str, str]:
    """Variables of the process that holds the layer, where the NPU is emulated."""
    if check.subject.engine != "ascend":
        return {}
    from afd_testkit.engines import ascend

    if ascend.real_device():
        return {}
    config = check.subject.config()
    check.facts[FACT] = ascend.emulation(config)
    # Only what decides which code is compiled runs here, and that is the host's in any case.
    return {**ascend.emulation_variables(config), "TORCHDYNAMO_DISABLE": "0"}


@dataclass
class _Expected:
    """Of two different batches: prompts, results of the stock worker, ids of the eager worker."""

    prompts: list[tuple[Prompt, ...]] = field(default_factory=list)
    baselines: list[Baseline] = field(default_factory=list)
    ids: list[tuple[IdArray, ...]] = field(default_factory=list)


def _expected(session: GateSession, subject: Subject) -> _Expected:
    """Measured once a session, without any fault."""
    key = (subject, NAME)
    if key not in session.kept:
        found = _Expected()
        if session.user:
            users = session.users(subject)
            found.prompts = [users, tuple(_reversed(prompt) for prompt in users)]
        else:
            corpus = session.corpus(subject)
            found.prompts = [
                corpus.prompts(lengths, offset=61 * number)
                for number, lengths in enumerate(_LENGTHS)
            ]
        found.baselines = [session.baseline(subject, prompts) for prompts in found.prompts]
        eager = session.split(subject)
        for number, prompts in enumerate(found.prompts):
            eager.reset_prefix_cache()
            watched = eager.run(
                salted(prompts, f"routing-{number}"), routing=RoutingSetting(watch=True)
            )
            found.ids.append(chosen_ids(watched))
        session.kept[key] = found
    expected = session.kept[key]
    if not isinstance(expected, _Expected):
        raise TypeError(f"{key} of the session holds {type(expected).__name__}")
    return expected


def _reversed(prompt: Prompt) -> Prompt:
    return Prompt(prompt.name, prompt.token_ids[::-1])


def _compiled(session: GateSession, subject: Subject) -> PrefillEngine:
    """The worker that routes through the operator, compiled while vLLM profiles it."""
    from afd_testkit.faults import FAULTS

    fault = None if session.fault is None else FAULTS[session.fault]
    at_start = fault.name if fault is not None and fault.at_start else None
    return session.start(
        subject.config(
            worker="afd",
            compiled=True,
            afd=(("async_moe_ubatching", False),),
            start_fault=at_start,
        )
    )


# What is run on the compiled model, in order: name, batch, whether the profile flag is set.
_RUNS = (
    ("serving, first batch", 0, False),
    ("serving, second batch", 1, False),
    (PROFILING, 1, True),
    ("serving again", 0, False),
)


def _model(session: GateSession, subject: Subject, case: str) -> Iterator[CheckResult]:
    """A whole model through vLLM's own compile path, then four runs through what it compiled."""
    for name, batch, profiling in _RUNS:

        def body(check: Check, batch: int = batch, profiling: bool = profiling) -> None:
            expected = _expected(session, subject)
            if not any(expected.ids):
                raise NotApplicable("no step of this model routes to experts")
            check.judging = True
            result = check.run(
                _compiled(session, subject),
                expected.prompts[batch],
                _OFF,
                RoutingSetting(profiling=profiling, watch=True),
            )
            if not profiling:  # first, so that a failure shows how far the numbers are off
                check.compare(result, expected.baselines[batch])
            _need_compiled_once(check, result)
            if profiling:
                _judge_profiling(check, result, expected, batch)
            else:
                _judge_serving(check, result, expected.ids[batch])

        yield run_check(session, NAME, subject, case, name, body)


def _need_compiled_once(check: Check, result: RunResult) -> None:
    """One graph for all runs, made while profiling, with gate, top-k and operator inside."""
    graphs: list[dict[str, int]] = result.facts["compiled_calls"]
    start = [result.facts[f"start_{name}"] for name in (BALANCED, _NATURAL)]
    check.facts |= {"compilations": len(graphs), "start_executions": start}
    check.need(len(graphs) == 1, f"the model was compiled {len(graphs)} times instead of once")
    check.need(
        start[0] > 0 and start[1] == 0,
        f"while vLLM profiled and compiled the model the operator ran {start[0]} times with "
        f"balanced and {start[1]} times with natural ids; all must be balanced",
    )
    [graph] = graphs
    layers = len(result.steps[0].expert_ids)
    for what, least in (("afd_balance_routing_ids_", layers), ("topk", layers), ("mm", layers)):
        held = sum(count for name, count in graph.items() if what in name)
        check.need(
            held >= least,
            f"{what} is {held} times in the compiled graph of {layers} sparse layers: {graph}",
        )


def _judge_serving(check: Check, result: RunResult, expected: tuple[IdArray, ...]) -> None:
    """The router's own ids, and the operator says so."""
    found = chosen_ids(result)
    check.need(
        len(found) == len(expected),
        f"the operator ran {len(found)} times, in the eager worker {len(expected)} times",
    )
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        _need_same(check, f"execution {number}", mine, theirs)
    _need_counted(check, result, balanced=0, natural=len(found))


def _judge_profiling(check: Check, result: RunResult, expected: _Expected, batch: int) -> None:
    """Even ids in every layer, which the experts then really use."""
    found = chosen_ids(result)
    check.need(bool(found), "the operator did not run")
    for number, ids in enumerate(found):
        uneven = why_uneven(ids, experts_of(check.subject.model))
        check.need(not uneven, f"execution {number}: {uneven}")
    _need_counted(check, result, balanced=len(found), natural=0)
    stock = expected.baselines[batch].run
    differs = any(
        bool((one.logprobs != other.logprobs).any())
        for one, other in zip(result.requests, stock.requests, strict=True)
    )
    check.need(differs, "the results are those of natural ids: the even ones were not used")


def _need_counted(check: Check, result: RunResult, *, balanced: int, natural: int) -> None:
    """The splitter's evidence counts what was seen."""
    told: list[dict[str, Any]] = [step.evidence for step in result.steps if step.evidence]
    counted = {name: sum(each[name] for each in told) for name in (BALANCED, _NATURAL)}
    check.facts |= counted
    check.need(
        counted == {BALANCED: balanced, _NATURAL: natural},
        f"{balanced} balanced and {natural} natural executions were seen; the evidence of the "
        f"steps counts {counted}",
    )
