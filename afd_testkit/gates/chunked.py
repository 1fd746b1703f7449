"""Gate ``chunked``: a prompt in chunks gives what it gives in one step.

Invariant: chunking, and splitting each chunked step, changes no result.  Oracle: the same
engine with its own worker, each prompt in one step.  Realized chunk counts come from the
engine; a run without chunks, or in which no chunk ended inside a cut request, fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afd_testkit.engines.base import Prompt, RunResult, SplitSetting
from afd_testkit.gates.check import Check, NotApplicable, need_split, run_check
from afd_testkit.gates.session import GateSession, Subject, salted, variant
from afd_testkit.gates.workloads import USER
from afd_testkit.results import CheckResult

NAME = "chunked"
# Tokens a step: a multiple of the block size, one that is not, and one larger than most prompts.
CHUNKS = (64, 100, 256)
LENGTHS = (200, 17, 330, 150, 90)
_SETTINGS: Sequence[SplitSetting] = (
    SplitSetting("off"),
    SplitSetting("token", 1),
    SplitSetting("token", 8),
    SplitSetting("request", 1),
)


def cases(session: GateSession) -> list[str]:
    """Chunk sizes."""
    prefix = f"{USER}, " if session.user else ""
    return [f"{prefix}chunks of {size}" for size in CHUNKS]


def ends_inside_cut_request(run: RunResult) -> int:
    """Steps that cut a request which, in addition, goes on in a later step."""
    lengths = {request.name: len(request.token_ids) for request in run.requests}
    found = 0
    for step in run.steps:
        if step.evidence is None or not step.evidence["cuts_request"]:
            continue
        token = 0
        for row in step.requests:
            end = token + row.num_scheduled
            if token < step.evidence["cut"] < end:
                found += row.num_computed + row.num_scheduled < lengths[row.name]
            token = end
    return found


def run(session: GateSession, subject: Subject, case: str) -> Iterator[CheckResult]:
    """One check a split setting."""
    size = int(case.rsplit(" ", 1)[1])
    for number, split in enumerate(_SETTINGS):

        def body(check: Check, split: SplitSetting = split, number: int = number) -> None:
            prompts = (
                session.users(subject) if session.user else session.corpus(subject).prompts(LENGTHS)
            )
            baseline = session.baseline(subject, prompts)
            check.judging = True
            engine = session.split(subject, step_tokens=size)
            engine.reset_prefix_cache()
            result = check.run(engine, salted(prompts, f"chunked-{number}"), split)
            check.facts["chunks"] = {r.name: list(r.chunks) for r in result.requests}
            check.facts["most_chunks"] = max(len(r.chunks) for r in result.requests)
            check.compare(result, baseline)
            _check_chunks(check, result, prompts, size)
            _check_split(check, result, split)

        yield run_check(session, NAME, subject, case, variant(split), body)


def _check_chunks(check: Check, result: RunResult, prompts: Sequence[Prompt], size: int) -> None:
    for request in result.requests:
        length = len(request.token_ids)
        check.need(
            sum(request.chunks) + request.cached_tokens == length and max(request.chunks) <= size,
            f"{request.name}: chunks {request.chunks} do not make up its {length} tokens "
            f"in steps of {size}",
        )
    longest = max(len(prompt.token_ids) for prompt in prompts)
    least = -(-longest // size)
    check.need(
        check.facts["most_chunks"] >= least,
        f"a prompt of {longest} tokens needs {least} chunks of {size}; "
        f"the engine used {check.facts['most_chunks']} at most",
    )
    if check.session.user and least < 2:
        raise NotApplicable(f"no prompt is longer than {size} tokens, so none was chunked")
    check.need(check.facts["most_chunks"] > 1, "no prompt was chunked")


def _check_split(check: Check, result: RunResult, split: SplitSetting) -> None:
    if split.policy == "off":
        return
    need_split(check, [result], split)
    check.facts["chunks_ending_inside_cut_request"] = ends_inside_cut_request(result)
    check.need(
        bool(check.session.user)
        or split.policy == "request"
        or check.facts["chunks_ending_inside_cut_request"] > 0,
        "no chunk ended inside a cut request",
    )
