"""Two runs of the same prompts, compared at every prompt position.

P = prompt tokens, C = cached tokens of a request.  Hidden states and log-probabilities exist
for positions C..P-1, the KV cache for all of 0..P-1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afd_testkit.engines.base import FloatArray, RequestResult, RunResult
from afd_testkit.gates.tolerances import QUANTITIES, Tolerance
from afd_testkit.results import Comparison, Profile, Worst

PROFILE_BUCKETS = 200


class NotComparable(ValueError):
    """Two runs do not describe the same prompts or shapes."""


@dataclass(frozen=True)
class Rows:
    """One quantity of one request: [N, W] rows from prompt position ``first`` on.

    ``layer`` is that of KV rows, from 0, and ``None`` for other quantities.
    """

    request: str
    first: int
    actual: FloatArray
    expected: FloatArray
    layer: int | None = None

    def difference(self) -> NDArray[np.float64]:
        """[N, W] absolute differences; a NaN or a lone infinity counts as infinite."""
        actual = self.actual.astype(np.float64)
        expected = self.expected.astype(np.float64)
        with np.errstate(invalid="ignore"):
            diff = np.abs(actual - expected)
        diff[np.isnan(diff)] = np.inf
        both_infinite = np.isinf(actual) & (actual == expected)
        diff[both_infinite] = 0.0
        return diff


def _overlap(
    name: str, actual: RequestResult, expected: RequestResult, quantity: str
) -> Iterator[Rows]:
    if quantity == "kv":
        if len(actual.kv) != len(expected.kv):
            raise NotComparable(
                f"{name}: {len(actual.kv)} layers of KV rows against {len(expected.kv)}"
            )
        for layer, (left, right) in enumerate(zip(actual.kv, expected.kv, strict=True)):
            yield _checked(Rows(name, 0, left, right, layer), quantity)
        return
    first = max(actual.cached_tokens, expected.cached_tokens)
    left = getattr(actual, "logprobs" if quantity == "logprob" else quantity)
    right = getattr(expected, "logprobs" if quantity == "logprob" else quantity)
    yield _checked(
        Rows(
            name,
            first,
            left[first - actual.cached_tokens :],
            right[first - expected.cached_tokens :],
        ),
        quantity,
    )


def _checked(rows: Rows, quantity: str) -> Rows:
    if rows.actual.shape != rows.expected.shape or rows.actual.shape[0] == 0:
        raise NotComparable(
            f"{rows.request}: {quantity} has shape {rows.actual.shape} against "
            f"{rows.expected.shape}; both runs must have the same, non-empty rows"
        )
    return rows


def rows_of(actual: RunResult, expected: RunResult, quantity: str) -> list[Rows]:
    """Rows of ``quantity`` for each request of ``actual``, matched by request name.

    Raises :class:`NotComparable` when a request, its tokens or its shapes do not match.
    """
    by_name = {request.name: request for request in expected.requests}
    rows: list[Rows] = []
    for request in actual.requests:
        other = by_name.get(request.name)
        if other is None or other.token_ids != request.token_ids:
            raise NotComparable(f"{request.name}: the other run has no such prompt")
        rows.extend(_overlap(request.name, request, other, quantity))
    return rows


@dataclass(frozen=True)
class Noise:
    """How much the engine varies by itself: maxima and means of |difference| by quantity."""

    maximum: Mapping[str, float]
    mean: Mapping[str, float]

    @classmethod
    def between(cls, pairs: Sequence[tuple[RunResult, RunResult]]) -> Noise:
        """Over several pairs of runs of the same prompts: the larger of each figure."""
        maximum = dict.fromkeys(QUANTITIES, 0.0)
        mean = dict.fromkeys(QUANTITIES, 0.0)
        for left, right in pairs:
            for quantity in QUANTITIES:
                diffs = [rows.difference() for rows in rows_of(left, right, quantity)]
                maximum[quantity] = max(maximum[quantity], *(float(d.max()) for d in diffs))
                mean[quantity] = max(mean[quantity], _mean(diffs))
        return cls(maximum, mean)


def _mean(diffs: Sequence[NDArray[np.float64]]) -> float:
    return float(sum(d.sum() for d in diffs) / sum(d.size for d in diffs))


def stages_of(run: RunResult) -> dict[str, NDArray[np.int8]]:
    """For each request the stage that computed each prompt position: 0, 1 or -1 (not split).

    Follows from the steps' own rows and the realized cuts.
    """
    stages = {
        request.name: np.full(len(request.token_ids), -1, dtype=np.int8) for request in run.requests
    }
    for step in run.steps:
        cut = None if step.evidence is None else step.evidence["cut"]
        if cut is None:
            continue
        token = 0
        for row in step.requests:
            marks = stages.get(row.name)
            if marks is not None:
                positions = row.num_computed + np.arange(row.num_scheduled)
                late = token + np.arange(row.num_scheduled) >= cut
                inside = positions < marks.size
                marks[positions[inside]] = late[inside]
            token += row.num_scheduled
    return stages


def _worst(rows: Rows, diff: NDArray[np.float64], stages: Mapping[str, NDArray[np.int8]]) -> Worst:
    row, column = np.unravel_index(int(diff.argmax()), diff.shape)
    return _position(rows, int(row), int(column), stages)


def _first(
    rows: Sequence[Rows],
    diffs: Sequence[NDArray[np.float64]],
    limit: float,
    stages: Mapping[str, NDArray[np.int8]],
) -> Worst | None:
    """The first position beyond ``limit``: by request, then token, layer and index."""
    order = {name: number for number, name in enumerate(dict.fromkeys(r.request for r in rows))}
    found: list[tuple[int, int, int]] = []  # request, token, place in rows (which has the layer)
    for place, (each, diff) in enumerate(zip(rows, diffs, strict=True)):
        beyond = (diff > limit).any(axis=1)
        if beyond.any():
            found.append((order[each.request], each.first + int(beyond.argmax()), place))
    if not found:
        return None
    _, token, place = min(found)
    row = token - rows[place].first
    return _position(rows[place], row, int((diffs[place][row] > limit).argmax()), stages)


def _position(rows: Rows, row: int, column: int, stages: Mapping[str, NDArray[np.int8]]) -> Worst:
    token = rows.first + row
    stage = int(stages[rows.request][token])
    return Worst(
        request=rows.request,
        token=token,
        stage=None if stage < 0 else stage,
        index=column,
        actual=float(rows.actual[row, column]),
        expected=float(rows.expected[row, column]),
        layer=rows.layer,
    )


def compare(
    actual: RunResult,
    expected: RunResult,
    noise: Noise,
    limits: Mapping[str, Tolerance],
) -> tuple[Comparison, ...]:
    """Every quantity at every position, then the greedy tokens.

    Raises :class:`NotComparable` when the runs do not fit together.
    """
    stages = stages_of(actual)
    found = []
    for quantity in QUANTITIES:
        rows = rows_of(actual, expected, quantity)
        diffs = [each.difference() for each in rows]
        place = int(np.argmax([diff.max() for diff in diffs]))
        compared = sum(diff.size for diff in diffs)
        comparison = _comparison(
            quantity,
            float(diffs[place].max()),
            limits[quantity],
            noise.maximum[quantity],
            compared,
            _worst(rows[place], diffs[place], stages),
        )
        if not comparison.ok:
            first = _first(rows, diffs, comparison.limit, stages)
            comparison = replace(comparison, first=first)
        found.append(comparison)
        mean = f"{quantity} mean"
        if mean in limits:
            found.append(
                _comparison(mean, _mean(diffs), limits[mean], noise.mean[quantity], compared, None)
            )
    found.append(_greedy(actual, expected, noise.maximum["logprob"], stages))
    return tuple(found)


def _comparison(
    quantity: str,
    max_diff: float,
    tolerance: Tolerance,
    noise: float,
    compared: int,
    worst: Worst | None,
) -> Comparison:
    limit = tolerance.with_noise(noise)
    return Comparison(
        quantity=quantity,
        max_diff=max_diff,
        limit=limit,
        tolerance=tolerance.limit,
        noise=noise,
        rule=tolerance.rule,
        ok=max_diff <= limit,
        compared=compared,
        worst=worst,
    )


def lead(logprobs: FloatArray, token: int) -> float:
    """By how much the best of one position's log-probabilities [V] leads ``token`` (nats)."""
    wide = logprobs.astype(np.float64)
    return float(wide.max() - wide[token])


def _greedy(
    actual: RunResult,
    expected: RunResult,
    noise: float,
    stages: Mapping[str, NDArray[np.int8]],
) -> Comparison:
    """Greedy tokens are equal; a flip to a token that the expected run puts within the noise
    of its best one does not count."""
    by_name = {request.name: request for request in expected.requests}
    worst: Worst | None = None
    first: Worst | None = None
    largest = 0.0
    for request in actual.requests:
        other = by_name[request.name]
        if request.greedy_token == other.greedy_token:
            continue
        behind = lead(other.logprobs[-1], request.greedy_token)
        if behind <= noise:
            continue
        token = len(request.token_ids) - 1
        stage = int(stages[request.name][token])
        at = Worst(
            request=request.name,
            token=token,
            stage=None if stage < 0 else stage,
            index=0,
            actual=request.greedy_token,
            expected=other.greedy_token,
        )
        first = first or at
        if behind >= largest:
            largest, worst = behind, at
    return Comparison(
        quantity="greedy",
        max_diff=largest,
        limit=noise,
        tolerance=0.0,
        noise=noise,
        rule="same token, or one that the expected run has within the noise (nats) of its best",
        ok=worst is None,
        compared=len(actual.requests),
        worst=worst,
        first=first,
    )


def profile(
    actual: RunResult,
    expected: RunResult,
    noise_pair: tuple[RunResult, RunResult],
    limit: float,
) -> Profile:
    """Log-probability difference and noise along all compared tokens, in equal buckets."""
    difference = np.concatenate(
        [rows.difference().max(axis=1) for rows in rows_of(actual, expected, "logprob")]
    )
    own = {rows.request: rows for rows in rows_of(*noise_pair, "logprob")}
    noise = np.concatenate(
        [
            own[request.name].difference().max(axis=1)[request.cached_tokens :]
            for request in actual.requests
        ]
    )
    cut = None
    if len(actual.steps) and difference.size:
        first = actual.steps[0]
        total = sum(row.num_scheduled for row in first.requests)
        if first.evidence is not None and first.evidence["cut"] and total == difference.size:
            cut = first.evidence["cut"] / total
    return Profile(
        quantity="logprob",
        difference=_bucketed(difference),
        noise=_bucketed(noise),
        limit=limit,
        cut=cut,
    )


def _bucketed(values: NDArray[np.float64]) -> tuple[float, ...]:
    buckets = np.array_split(values, min(PROFILE_BUCKETS, values.size))
    return tuple(float(bucket.max()) for bucket in buckets)
