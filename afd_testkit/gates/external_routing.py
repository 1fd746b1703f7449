"""Gate ``external-routing``: experts behind a connector give what they give in the layer.

Invariant: neither the connector, nor the side that routes, nor a call that failed before, changes
any prompt position's result; both placements choose the same experts.  Oracle: the same engine
with its own worker.  What travelled is counted by the connector, and must be what the model's
passes and the routing operator's executions, counted elsewhere, say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from afd_testkit.engines.base import (
    EngineError,
    IdArray,
    PrefillEngine,
    Prompt,
    RoutingSetting,
    RunResult,
    SplitSetting,
)
from afd_testkit.faults import CONTROL
from afd_testkit.gates.check import Check, NotApplicable, run_check
from afd_testkit.gates.compare import Noise
from afd_testkit.gates.every_rank import EveryRank
from afd_testkit.gates.routing_ids import chosen_ids
from afd_testkit.gates.session import Baseline, GateSession, Subject
from afd_testkit.gates.workloads import USER
from afd_testkit.results import CheckResult

NAME = "external-routing"
CHUNK = 100  # tokens a step: no multiple of the block size
LENGTHS = (3, 200, 17, 64, 120)
ENGINES = ("vllm-cpu", "ascend")
STEPS = ("prepare", "experts", "finalize")
_HEADER_BYTES = 36  # of a payload, by its format
_WAYS = "moe_communication"  # fact of an engine's run that says how experts exchanged tokens
_OFF = SplitSetting("off")
_WATCH = RoutingSetting(watch=True)
_ATTENTION, _EXPERTS = "gate on attention side", "gate on experts' side"


def cases(session: GateSession) -> list[str]:
    """Prompts in one step, and in chunks."""
    prefix = f"{USER}, " if session.user else ""
    return [f"{prefix}one step", f"{prefix}chunks of {CHUNK}"]


def applies(subject: Subject) -> bool:
    """Engines whose worker has the connector, and one tensor-parallel rank."""
    return subject.engine in ENGINES and subject.topology.tensor_parallel == 1


def run(session: GateSession, subject: Subject, case: str) -> Iterator[CheckResult]:
    """Both placements, the experts that they choose, and calls after failures and without work.

    In this order, so that an engine is started once a case.
    """
    this = _Case(session, subject, None if case.endswith("one step") else CHUNK)
    runs: dict[str, RunResult] = {}

    def check(variant: str, body: Callable[[Check], None], fault: str | None) -> CheckResult:
        told = replace(session, fault=fault)
        return run_check(told, NAME, subject, case, variant, body)

    def placed(variant: str) -> CheckResult:
        def body(check: Check) -> None:
            runs[variant] = this.placement(check, gate_here=variant == _ATTENTION)

        return check(variant, body, session.fault)

    yield placed(_ATTENTION)
    if this.step_tokens is None:
        for step in STEPS:
            fault = session.fault
            if fault in (None, CONTROL):
                fault = f"interrupted-in-{step}"
            yield check(f"after a failure in {step}", this.interrupted, fault)
        if subject.topology.data_parallel > 1:
            yield check("a rank without tokens", this.idle_rank, session.fault)
    yield placed(_EXPERTS)

    def alike(check: Check) -> None:
        check.need(set(runs) == {_ATTENTION, _EXPERTS}, "a placement gave no result")
        check.judging = True
        _check_same_experts(check, runs[_ATTENTION], runs[_EXPERTS])

    yield check("same experts", alike, session.fault)


class _Case:
    """Prompts, baselines and engines of one case; each asked for once."""

    def __init__(self, session: GateSession, subject: Subject, step_tokens: int | None) -> None:
        self._session = session
        self._subject = subject
        self.step_tokens = step_tokens
        self._prompts: tuple[Prompt, ...] = ()

    def prompts(self) -> tuple[Prompt, ...]:
        """Built-in ones, or the user's."""
        if not self._prompts:
            session, subject = self._session, self._subject
            self._prompts = (
                session.users(subject) if session.user else session.corpus(subject).prompts(LENGTHS)
            )
        return self._prompts

    def _alone(self) -> Baseline:
        """The longest prompt on the stock engine, its other data-parallel ranks without any."""
        prompt = max(self.prompts(), key=lambda each: len(each.token_ids))

        def measure() -> Baseline:
            engine = self._session.start(self._subject.config())
            first, second = (engine.run([prompt]) for _ in range(2))
            return Baseline(first, second, Noise.between([(second, first)]))

        return self._session.once(self._subject, f"on one rank: {prompt!r}", measure)

    def _baseline(self) -> Baseline:
        """Of all prompts; that of one rank is measured beside it, while the stock engine runs."""
        baseline = self._session.baseline(self._subject, self.prompts())
        if self._subject.topology.data_parallel > 1 and self.step_tokens is None:
            self._alone()
        return baseline

    def _engine(self, *, gate_here: bool, deal: bool = False) -> PrefillEngine:
        """``deal``: prompts are dealt out to data-parallel ranks; else each gets all of them."""
        config = self._subject.config(
            worker="afd",
            step_tokens=self.step_tokens,
            afd=(
                ("async_moe_ubatching", False),
                ("connector", "loopback"),
                ("compute_gate_on_attention", gate_here),
            ),
        )
        try:
            engine = self._session.start(config)
        except EngineError as error:
            if "no layer with routed experts" in str(error):
                raise NotApplicable("the model has no routed experts") from error
            raise
        return EveryRank(engine) if config.data_parallel > 1 and not deal else engine

    def placement(self, check: Check, *, gate_here: bool) -> RunResult:
        """The prompts with the gate on one side, against the baseline."""
        prompts, baseline = self.prompts(), self._baseline()
        check.judging = True
        result = check.run(self._engine(gate_here=gate_here), prompts, _OFF, _WATCH)
        check.compare(result, baseline)
        _check_travelled(check, result, with_routing=gate_here)
        self._check_way(check, result)
        if self.step_tokens is not None:
            check.facts["most_chunks"] = most = max(len(r.chunks) for r in result.requests)
            if check.session.user and all(len(p.token_ids) <= CHUNK for p in prompts):
                raise NotApplicable(f"no prompt is longer than {CHUNK} tokens")
            check.need(most > 1, "no prompt was chunked")
        return result

    def _check_way(self, check: Check, result: RunResult) -> None:
        """On an A3 that spreads experts, chunks go through MC2 and the whole batch all-to-all.

        vLLM-Ascend takes MC2 for as many tokens as there may be requests, which is 256 of 404
        and all of a chunk.  The user's prompts may be of any length.
        """
        topology = self._subject.topology
        if topology.soc == "A3" and topology.expert_parallel and not check.session.user:
            way = "ALLTOALL" if self.step_tokens is None else "MC2"
            check.need(
                way in result.facts[_WAYS],
                f"experts must exchange tokens by {way}; they did by {result.facts[_WAYS]}",
            )

    def interrupted(self, check: Check) -> None:
        """The same after the first call of a layer's experts has failed and was made again."""
        prompts, baseline = self.prompts(), self._baseline()
        check.judging = True
        result = check.run(self._engine(gate_here=True), prompts, _OFF, _WATCH)
        check.compare(result, baseline)
        again = self._subject.topology.data_parallel  # one call on each rank
        _check_travelled(check, result, with_routing=True, again=again)

    def idle_rank(self, check: Check) -> None:
        """One prompt, so that all data-parallel ranks but one run along without any."""
        baseline = self._alone()
        check.judging = True
        engine = self._engine(gate_here=True, deal=True)
        prompt = Prompt(baseline.run.requests[0].name, baseline.run.requests[0].token_ids)
        result = check.run(engine, [prompt], _OFF, _WATCH)
        check.compare(result, baseline)
        dealt = check.facts["prompts_of_ranks"] = result.facts["data_parallel_prompts"]
        ranks = self._subject.topology.data_parallel
        check.need(
            dealt == [[prompt.name], *([[]] * (ranks - 1))],
            f"one rank of {ranks} must have the prompt and the others none; they had {dealt}",
        )
        _check_travelled(check, result, with_routing=True)


def _check_travelled(
    check: Check, result: RunResult, *, with_routing: bool, again: int = 0
) -> None:
    """What the connector counted is what the model's passes and the operator say.

    ``again``: calls that failed and were made again.
    """
    counts = dict.fromkeys(("calls", "payloads", "tokens", "payload_bytes", "activation_bytes"), 0)
    ids: list[IdArray] = []
    for number, step in enumerate(result.steps):
        evidence = step.evidence or {}
        check.need("transfer" in evidence, f"step {number} says nothing of what travelled")
        for name in counts:
            counts[name] += evidence["transfer"][name]
        rows = {each.shape[0] for each in step.expert_ids}
        check.need(
            rows == set(step.forward_rows),
            f"step {number} passed {step.forward_rows} rows through the model; experts were chosen "
            f"for {sorted(rows)}",
        )
        ids.extend(step.expert_ids)
    check.facts["travelled"] = counts
    if _WAYS in result.facts:
        check.facts[_WAYS] = result.facts[_WAYS]
    check.need(bool(ids), "no expert was chosen: the model's layers were not reached")
    check.need(
        counts["calls"] == len(ids) + again,
        f"experts were chosen {len(ids)} times and {again} calls were made again; the connector "
        f"carried {counts['calls']}",
    )
    check.need(
        counts["payloads"] == (counts["calls"] if with_routing else 0),
        f"of {counts['calls']} activations {counts['payloads']} travelled with routing",
    )
    if again:
        return
    tokens = sum(each.shape[0] for each in ids)
    size = sum(_HEADER_BYTES + each.size * (4 + 4) for each in ids) if with_routing else 0
    found = counts["tokens"], counts["payload_bytes"]
    check.need(
        found == (tokens, size),
        f"{tokens} rows with {size} bytes of routing (int32 ids, float32 weights) must travel; it "
        f"were {found[0]} and {found[1]}",
    )


def _check_same_experts(check: Check, one: RunResult, other: RunResult) -> None:
    """Wherever the gate is, each row goes to the same experts in the same order."""
    left, right = chosen_ids(one), chosen_ids(other)
    check.facts["expert_choices"] = int(sum(ids.size for ids in left))
    check.need(
        [ids.shape for ids in left] == [ids.shape for ids in right],
        "the placements chose experts for other rows",
    )
    for number, (mine, theirs) in enumerate(zip(left, right, strict=True)):
        apart = np.argwhere(mine != theirs)
        if len(apart):
            row, choice = apart[0]
            check.need(
                False,
                f"execution {number} of the routing operator, row {row}: expert "
                f"{mine[row, choice]} with the gate on the attention side, "
                f"{theirs[row, choice]} on the experts'",
            )
