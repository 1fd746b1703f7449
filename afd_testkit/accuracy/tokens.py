"""Log-probabilities of reference answers, an arm's against the unsplit one's, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite

from afd_testkit.accuracy.margins import token_limit
from afd_testkit.accuracy.spec import TOKENS, ArmResult
from afd_testkit.results import Comparison, Worst

Logprobs = Mapping[str, list[float]]  # by question id, in nats


def compare_tokens(base: Logprobs, arm: Logprobs, noise: Logprobs, dtype: str) -> Comparison:
    """``arm`` against ``base``; ``noise``: of the same answers as ``base``, in other batches.

    Not ok where the noise is of other answers, of none, or no number: then nothing limits it.
    """
    measured = _largest(base, noise)[0]
    tolerance, allowed = token_limit(dtype, measured)
    largest, worst = _largest(base, arm)
    ok = isfinite(measured) and largest <= allowed
    return Comparison(
        quantity=TOKENS,
        max_diff=largest,
        limit=allowed,
        tolerance=tolerance.limit,
        noise=measured,
        rule=tolerance.rule,
        ok=ok,
        compared=sum(map(len, arm.values())),
        worst=worst,
        first=None if ok else worst,
    )


def _largest(base: Logprobs, arm: Logprobs) -> tuple[float, Worst | None]:
    """The largest difference over the questions of ``arm``, and where it is.

    Infinite where there is none, ``base`` has no such question, or another number of its tokens.
    """
    largest, where = 0.0, None
    if not arm:
        return inf, None
    for name, values in arm.items():
        if len(base.get(name, ())) != len(values):
            return inf, None
        for token, (got, expected) in enumerate(zip(values, base[name], strict=True)):
            # What is no finite number is as far off as can be, also from itself.
            apart = abs(got - expected) if isfinite(got) and isfinite(expected) else inf
            if where is None or apart > largest:
                largest = apart
                where = Worst(name, token, None, token, got, expected)
    return largest, where


def alike(base: Logprobs, arm: Logprobs) -> bool:
    """Whether both have values of the same tokens of the same answers, and of any."""
    lengths = [{name: len(values) for name, values in one.items()} for one in (base, arm)]
    return lengths[0] == lengths[1] != {}


def not_taken(base: ArmResult, arm: ArmResult) -> str:
    """Why log-probabilities of two arms cannot be compared; a server says why it gave none."""
    said = {str(one.facts["logprobs"]) for one in (base, arm) if "logprobs" in one.facts}
    counts = f"{len(base.logprobs)} reference answers unsplit and of {len(arm.logprobs)} here"
    return (
        f"log-probabilities are to be compared, and were taken of {counts}"
        f"{', since ' + ' and '.join(sorted(said)) if said else ''}; take both of one list"
    )


def told(tokens: Comparison) -> str:
    """Why a comparison of log-probabilities is not ok."""
    if tokens.noise is None or not isfinite(tokens.noise):
        return (
            "the engine's own noise is no number, or of other answers, so that nothing limits what "
            "log-probabilities may differ by; measure it with the unsplit arm"
        )
    where = tokens.worst
    place = "" if where is None else f" at token {where.token} of the answer to {where.request}"
    return (
        f"the reference answers' log-probabilities differ by up to {tokens.max_diff:.3g}{place}; "
        f"allowed are {tokens.limit:.3g} ({tokens.rule})"
    )
