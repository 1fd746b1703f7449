"""Gate ``stability``: nothing depends on what ran before, or on the rest of the batch.

Invariant: a prompt's result is its own.  Oracle: each prompt alone on the same engine with its
own worker.  One engine runs many mixed steps with the split on, its settings interleaved, with
prefix hits and decodes among prefills.  In the end the first batch must come out as it first
did, and the last one as it does on an engine just started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from afd_testkit.engines.base import Prompt, RunResult, SplitSetting
from afd_testkit.gates.check import Check, need_split, run_check
from afd_testkit.gates.compare import Noise
from afd_testkit.gates.session import Baseline, GateSession, Subject, joined
from afd_testkit.gates.workloads import USER
from afd_testkit.results import CheckResult, Comparison

NAME = "stability"
_INTERLEAVED: Sequence[SplitSetting] = (
    SplitSetting("token", 1),
    SplitSetting("request", 1),
    SplitSetting("token", 8),
    SplitSetting("off"),
    SplitSetting("token", 2),
)
STEP_TOKENS = 256  # small enough that most rounds mix chunks, new prompts and decodes


def cases(session: GateSession) -> list[str]:
    """One engine, many rounds."""
    return [USER if session.user else "interleaved"]


def _rounds(session: GateSession, subject: Subject) -> list[tuple[Prompt, ...]]:
    """Batches of prompts; the same lengths in every run, some prompts come again and again."""
    if session.user:
        return [session.users(subject)] * session.rounds
    corpus = session.corpus(subject)
    random = np.random.default_rng(7)
    pool = corpus.prompts([int(n) for n in random.integers(1, 220, 14)], prefix="p", max_tokens=3)
    return [
        tuple(pool[i] for i in random.permutation(len(pool))[: int(random.integers(2, 8))])
        for _ in range(session.rounds)
    ]


def _alone(session: GateSession, subject: Subject, rounds: list[tuple[Prompt, ...]]) -> Baseline:
    """Every prompt by itself, twice; computed once a session."""
    named = {prompt.name: prompt for batch in rounds for prompt in batch}
    prompts = tuple(named.values())

    def measure() -> Baseline:
        engine = session.stock(subject)
        runs = [joined([engine.run([prompt]) for prompt in prompts], prompts) for _ in range(2)]
        together = engine.run(prompts)
        return Baseline(runs[0], together, Noise.between([(runs[1], runs[0]), (together, runs[0])]))

    return session.once(subject, f"alone: {prompts!r}", measure)


def run(session: GateSession, subject: Subject, case: str) -> Iterator[CheckResult]:
    """All rounds; the return to the first; and the last round on an engine just started."""
    rounds = _rounds(session, subject)
    done: list[RunResult] = []

    def mixed(check: Check) -> None:
        baseline = _alone(session, subject, rounds)
        check.judging = True
        engine = session.split(subject, step_tokens=STEP_TOKENS)
        engine.reset_prefix_cache()
        for number, batch in enumerate(rounds):
            done.append(check.run(engine, batch, _setting(number)))
            check.compare(done[-1], baseline)
        check.facts["rounds"] = len(rounds)
        check.facts["steps"] = len(check.balance)
        check.facts["steps_cut_inside_request"] = sum(b.cuts_request for b in check.balance)
        # The worst round of each quantity stands for all.
        worst: dict[str, Comparison] = {}
        for comparison in check.comparisons:
            held = worst.get(comparison.quantity)
            if held is None or comparison.max_diff > held.max_diff:
                worst[comparison.quantity] = comparison
        check.comparisons = list(worst.values())
        need_split(check, done, SplitSetting("token"))

    yield run_check(session, NAME, subject, case, f"{len(rounds)} rounds", mixed)

    def returned(check: Check) -> None:
        check.need(len(done) == len(rounds), "the rounds did not all give a result")
        check.judging = True
        engine = session.split(subject, step_tokens=STEP_TOKENS)
        engine.reset_prefix_cache()
        check.compare(check.run(engine, rounds[0], _setting(0)), _as_baseline(done[0]))

    yield run_check(session, NAME, subject, case, "first round again", returned)

    def fresh(check: Check) -> None:
        check.need(len(done) == len(rounds), "the rounds did not all give a result")
        check.judging = True
        session.split(subject, step_tokens=STEP_TOKENS).close()
        engine = session.split(subject, step_tokens=STEP_TOKENS)
        last = len(rounds) - 1
        check.compare(check.run(engine, rounds[last], _setting(last)), _as_baseline(done[last]))

    yield run_check(session, NAME, subject, case, "last round, fresh engine", fresh)


def _setting(number: int) -> SplitSetting:
    return _INTERLEAVED[number % len(_INTERLEAVED)]


def _as_baseline(run: RunResult) -> Baseline:
    """An earlier result of the same prompts, with no noise of its own to excuse a difference."""
    return Baseline(run, run, Noise.between([(run, run)]))
