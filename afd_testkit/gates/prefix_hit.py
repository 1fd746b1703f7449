"""Gate ``prefix-hit``: prompts whose prefix is cached give what uncached prompts give.

Invariant: a hit changes no result.  Oracle: the same engine with its own worker, unsplit and
without prefix caching.  Realized hits come from the engine and must be those that the shared
length and block size allow; a gate without hits fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afd_testkit.engines.base import Prompt, RunResult, SplitSetting, StepRecord
from afd_testkit.gates.check import Check, need_split, run_check
from afd_testkit.gates.realized import is_prefill
from afd_testkit.gates.session import GateSession, Subject, variant
from afd_testkit.gates.workloads import USER, Corpus
from afd_testkit.results import CheckResult

NAME = "prefix-hit"
RATIOS = (0, 25, 50, 75, 90)  # percent of each prompt's tokens that all prompts share
PROMPTS = 5  # an odd number of equal prompts: half of the tokens is inside one of them
# Tokens a prompt.  Realized ratios: 0, 20, 50, 70 and 90 % with blocks of 32 tokens,
# 0, 0, 40, 40 and 80 % with blocks of 128.
LENGTH = 320
SAME_STEP = "same-step"
_SETTINGS: Sequence[SplitSetting] = (
    SplitSetting("off"),
    SplitSetting("token", 1),
    SplitSetting("token", 4),
    SplitSetting("request", 1),
)


def cases(session: GateSession) -> list[str]:
    """Shared ratios, then the steps in which one request hits what another is writing."""
    if session.user:
        return [USER]
    return [f"{ratio} %" for ratio in RATIOS] + [f"{SAME_STEP}, {end}" for end in _WRITERS]


def family(corpus: Corpus, ratio: int, generation: int) -> tuple[Prompt, ...]:
    """Prompts that share ``ratio`` percent; each generation has suffixes of its own."""
    shared = LENGTH * ratio // 100
    prefix = corpus.cut(0, shared)
    return tuple(
        Prompt(
            name=f"g{generation}r{i}",
            token_ids=prefix + corpus.cut(911 + 53 * (PROMPTS * generation + i), LENGTH - shared),
        )
        for i in range(PROMPTS)
    )


def _realized(run: RunResult) -> float:
    """Percent of prompt tokens that came from the cache, as the engine reports it."""
    cached = sum(request.cached_tokens for request in run.requests)
    return 100 * cached / sum(len(request.token_ids) for request in run.requests)


def run(session: GateSession, subject: Subject, case: str) -> Iterator[CheckResult]:
    """Checks of one case, with the split off and on."""
    if case.startswith(SAME_STEP):
        yield from _same_step(session, subject, case)
        return
    for split in _SETTINGS:
        for state in ("cold", "steady"):

            def body(check: Check, split: SplitSetting = split, state: str = state) -> None:
                if case == USER:
                    need_split(check, _user_body(check, split, state), split)
                else:
                    runs = _family_body(check, int(case.split()[0]), split, state)
                    _check_split(check, runs, split)

            yield run_check(session, NAME, subject, case, f"{state}, {variant(split)}", body)


def _family_body(check: Check, ratio: int, split: SplitSetting, state: str) -> list[RunResult]:
    """The runs under test."""
    session, subject = check.session, check.subject
    corpus = session.corpus(subject)
    measured = family(corpus, ratio, 1)
    baseline = session.baseline(subject, measured)
    check.judging = True
    engine = session.split(subject)
    engine.reset_prefix_cache()
    runs = [check.run(engine, family(corpus, ratio, 0), split)] if state == "steady" else []
    runs.append(check.run(engine, measured, split))
    result = runs[-1]
    shared = LENGTH * ratio // 100
    block = engine.config.block_size
    hit = shared // block * block
    # In a cold cache the first prompt finds nothing; its followers hit what it is writing.
    expected = [0 if state == "cold" and i == 0 else hit for i in range(PROMPTS)]
    realized = [request.cached_tokens for request in result.requests]
    check.facts["requested_percent"] = ratio
    check.facts["realized_percent"] = round(_realized(result), 1)
    check.compare(result, baseline)
    check.need(
        realized == expected,
        f"prompts sharing {shared} of {LENGTH} tokens must hit {expected} tokens with blocks of "
        f"{block}; the engine reports {realized}",
    )
    return runs


def _check_split(check: Check, runs: Sequence[RunResult], split: SplitSetting) -> None:
    """Some step was split, unless every request boundary parts a reader from its writer.

    That is so where the engine sorts requests with computed tokens to the front of a step: in a
    cold cache these are the readers of what the others of the step compute.
    """
    steps = [step for run in runs for step in run.steps if is_prefill(step)]
    if split.policy != "request" or not all(_readers_first(step) for step in steps):
        need_split(check, runs, split)
        return
    for step in steps:
        check.need(
            step.evidence is not None and step.evidence["hazard_action"] == "unsplit",
            f"no request boundary of the step is safe, and the evidence must say so; it says "
            f"{step.evidence}",
        )


def _readers_first(step: StepRecord) -> bool:
    """Whether every boundary has a reader before it and a writer behind it."""
    writes = [row.num_computed == 0 for row in step.requests]
    return len(writes) > 1 and all(
        not all(writes[:bound]) and any(writes[bound:]) for bound in range(1, len(writes))
    )


def _user_body(check: Check, split: SplitSetting, state: str) -> list[RunResult]:
    """The runs under test."""
    session, subject = check.session, check.subject
    prompts = session.users(subject)
    baseline = session.baseline(subject, prompts)
    check.judging = True
    engine = session.split(subject)
    engine.reset_prefix_cache()
    runs = [check.run(engine, prompts, split) for _ in range(2 if state == "steady" else 1)]
    result = runs[-1]
    check.facts["realized_percent"] = round(_realized(result), 1)
    check.compare(result, baseline)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    check.need(
        state == "cold" or longest <= engine.config.block_size or _realized(result) > 0,
        "the prompts were sent twice, yet the engine reports no hit",
    )
    return runs


# Tokens of the writing request, and how many of them the reader shares: whole blocks of any size
# up to 128.  Behind the shared part of 520 a cut is safe; of 512 the reader needs the very last
# token, and no cut is.
_WRITERS = {"cut moved": (520, 512), "no safe cut": (512, 512)}
_STEP = 280  # tokens a step: the short request and 272 of the writer come first


def _same_step_prompts(corpus: Corpus, writer: int, shared: int) -> tuple[Prompt, ...]:
    """A short request whose row a reader takes over, a writer of two steps, and the reader.

    Step 1 runs the short request and the first chunk of the writer.  In step 2 the reader
    takes the row that the short one left, before the writer's, and hits the blocks that the
    writer computes in that very step.
    """
    long = corpus.cut(0, writer)
    return (
        Prompt("short", corpus.cut(4001, 8)),
        Prompt("writer", long),
        Prompt("reader", long[:shared] + corpus.cut(5003, 20)),
    )


def _same_step(session: GateSession, subject: Subject, case: str) -> Iterator[CheckResult]:
    ending = case.removeprefix(f"{SAME_STEP}, ")
    for split in (SplitSetting("off"), SplitSetting("token", 1), SplitSetting("request", 1)):

        def body(check: Check, split: SplitSetting = split) -> None:
            prompts = _same_step_prompts(session.corpus(subject), *_WRITERS[ending])
            baseline = session.baseline(subject, prompts)
            check.judging = True
            engine = session.split(subject, step_tokens=_STEP)
            engine.reset_prefix_cache()
            result = check.run(engine, prompts, split)
            check.compare(result, baseline)
            _check_hazard(check, result, split, ending)

        yield run_check(session, NAME, subject, case, split.policy, body)


def _check_hazard(check: Check, result: RunResult, split: SplitSetting, ending: str) -> None:
    """The dependency really stood in one step, and the splitter named and avoided it."""
    reader, writer = result.requests[2], result.requests[1]
    check.facts["realized_percent"] = round(_realized(result), 1)
    check.facts["reader_cached_tokens"] = reader.cached_tokens
    second = result.steps[1]
    names = [row.name for row in second.requests]
    check.need(
        names == ["reader", "writer"] and reader.cached_tokens > writer.chunks[0],
        f"the reader must stand before the writer and hit blocks of its second chunk; the step "
        f"ran {names} with {reader.cached_tokens} cached tokens after a first chunk of "
        f"{writer.chunks[0]}",
    )
    if split.policy == "off" or second.evidence is None:
        return
    action = second.evidence["hazard_action"]
    # Between request boundaries there is only one cut here, which is never safe.
    wanted = "moved" if ending == "cut moved" and split.policy == "token" else "unsplit"
    check.facts["hazard"] = second.evidence["hazard"]
    check.facts["hazard_action"] = action
    check.need(
        action == wanted,
        f"the hazard must be named and the step {wanted}; the evidence says {second.evidence}",
    )
