"""Charts of the page as inline SVG: stage balance, difference against noise, scores.

Everything a chart shows is also said in words, in its ``aria-label`` and beside it.
Colours come from the page's style sheet through class names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import isfinite

from markupsafe import Markup

from afd_testkit.accuracy_view import ArmScore, share
from afd_testkit.failure import number, printable
from afd_testkit.results import Profile, StageBalance
from afd_testkit.summary import imbalance

_BAR_WIDTH, _BAR_HEIGHT = 400, 22
_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP = 46, 8, 10
_FLOOR = _HEIGHT - 24  # y of the axis
#: Decades drawn below the largest value, so that one near-zero bucket cannot flatten the rest.
_MOST_DECADES = 9


def balance_words(step: StageBalance) -> str:
    """One step in words: real tokens a stage, padding, imbalance, cut, reason, hazard."""
    sizes = [
        f"{real}{f' (+{physical - real} padding)' if physical > real else ''}"
        for real, physical in zip(step.tokens, _physical(step), strict=True)
    ]
    if len(step.tokens) > 1:
        cut = "inside a request" if step.cuts_request else "between requests"
        parts = [f"{' | '.join(sizes)} tokens", f"imbalance {imbalance(step):.2f}", cut]
    else:
        parts = [f"not split: {''.join(sizes) or 0} tokens"]
    return printable(", ".join([*parts, *(text for text in (step.reason, step.hazard) if text)]))


def _physical(step: StageBalance) -> list[int]:
    """Physical tokens a stage; a step that was not split may report none, hence no padding."""
    return [
        max(step.input_tokens[stage], real) if stage < len(step.input_tokens) else real
        for stage, real in enumerate(step.tokens)
    ]


def balance_bar(step: StageBalance, widest: int) -> Markup:
    """One bar: the stages' real tokens, padding hatched, scaled to ``widest`` tokens in all."""
    scale = _BAR_WIDTH / max(widest, 1)
    shapes, x = [], 0.0
    for stage, (real, physical) in enumerate(zip(step.tokens, _physical(step), strict=True)):
        name = "solo" if len(step.tokens) == 1 else f"s{stage % 2}"
        shapes.append(_rect(x, real * scale, name))
        if physical > real:
            # A few tokens of padding must stay visible beside hundreds of real ones.
            shapes.append(_rect(x + real * scale, max((physical - real) * scale, 3.0), "pad"))
        x += physical * scale
        if stage + 1 < len(step.tokens):
            shapes.append(Markup('<path class="seam" d="M{:.1f} 0v{}"/>').format(x, _BAR_HEIGHT))
    return Markup(
        '<svg class="bar" role="img" aria-label="{}" viewBox="0 0 {} {}"'
        ' preserveAspectRatio="none">{}</svg>'
    ).format(balance_words(step), _BAR_WIDTH + 4, _BAR_HEIGHT, Markup("").join(shapes))


def _rect(x: float, width: float, name: str) -> Markup:
    return Markup('<rect class="{}" x="{:.1f}" width="{:.1f}" height="{}"/>').format(
        name, x, width, _BAR_HEIGHT
    )


def profile_words(profile: Profile) -> str:
    """A profile in words: what is drawn, its extremes, the limit and the cut."""
    limit = f"limit {number(profile.limit)}"
    if is_flat(profile):
        return (
            f"{printable(profile.quantity)}: every difference is exactly 0; "
            f"largest noise {_peak(profile.noise)}, {limit}"
        )
    cut = "" if profile.cut is None else f"; stage 1 begins at {profile.cut:.0%} of the axis"
    odd = sum(not isfinite(value) for value in profile.difference)
    return (
        f"{printable(profile.quantity)} by position: "
        f"largest difference {_peak(profile.difference)}, largest noise {_peak(profile.noise)}, "
        f"{limit}{f'; {odd} positions not finite' if odd else ''}{cut}"
    )


def is_flat(profile: Profile) -> bool:
    """Whether every difference is exactly 0, so that there is nothing to draw."""
    return not any(profile.difference)


def _peak(values: Sequence[float]) -> str:
    if any(math.isnan(value) for value in values):
        return "NaN"
    return number(max(values)) if values else "not measured"


def profile_chart(profile: Profile, points: int = 200) -> Markup:
    """Difference and noise along the positions on a log scale, with limit and cut.

    At most ``points`` points a line, each the maximum of its positions.  Zeros lie on the
    floor of the chart, values that are not finite on its ceiling, marked.
    """
    difference = _coarse(profile.difference, points)
    noise = _coarse(profile.noise, points)
    low, high = _decades([*difference, *noise, profile.limit])
    parts = [_axis(low, high)]
    labels = []
    if profile.cut is not None:
        x = _LEFT + profile.cut * (_WIDTH - _LEFT - _RIGHT)
        # Too near the right edge the label would be cut off.
        anchor, shift = ("end", -5) if profile.cut > 0.8 else ("start", 5)
        parts.append(Markup('<path class="cut" d="M{:.0f} {}V{}"/>').format(x, _TOP, _FLOOR))
        labels.append(_label(x + shift, _FLOOR - 6, "stage 1 begins", anchor))
    if isfinite(profile.limit) and profile.limit > 0:
        y = _y(profile.limit, low, high)
        parts.append(
            Markup('<path class="limit" d="M{} {:.0f}H{}"/>').format(_LEFT, y, _WIDTH - _RIGHT)
        )
        labels.append(
            _label(_WIDTH - _RIGHT, y - 4, f"limit {number(profile.limit)}", "end", "lim")
        )
    parts += [_line(noise, low, high, "noise"), _line(difference, low, high, "diff")]
    parts += [_odd_mark(i, len(difference)) for i, v in enumerate(difference) if not isfinite(v)]
    parts += labels
    return Markup(
        '<svg class="chart" role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>'
    ).format(profile_words(profile), _WIDTH, _HEIGHT, Markup("").join(parts))


def _coarse(values: Sequence[float], points: int) -> list[float]:
    """Maxima over equal runs of values, NaN winning, so that no peak is lost."""
    size = max(1, math.ceil(len(values) / points))
    runs = (values[start : start + size] for start in range(0, len(values), size))
    return [math.nan if any(map(math.isnan, run)) else max(run) for run in runs]


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Exponents of ten that bound the positive values, at least one apart."""
    logs = [math.log10(value) for value in values if isfinite(value) and value > 0]
    if not logs:
        return -8, 0
    high = math.floor(max(logs)) + 1
    return max(min(math.floor(min(logs)), high - 2), high - _MOST_DECADES), high


def _y(value: float, low: int, high: int) -> float:
    if not isfinite(value):
        return _TOP
    if value <= 0:
        return _FLOOR
    share = (math.log10(value) - low) / (high - low)
    return _FLOOR - min(max(share, 0.0), 1.0) * (_FLOOR - _TOP)


def _x(index: int, count: int) -> float:
    return _LEFT + (index + 0.5) / count * (_WIDTH - _LEFT - _RIGHT)


def _line(values: Sequence[float], low: int, high: int, name: str) -> Markup:
    """A polyline; coordinates in whole pixels keep pages with hundreds of checks small."""
    points = [
        f"{_x(i, len(values)):.0f} {_y(value, low, high):.0f}" for i, value in enumerate(values)
    ]
    if not points:
        return Markup("")
    if len(points) == 1:  # one position: a mark as wide as the axis
        points = [f"{_LEFT} {points[0].split()[1]}", f"{_WIDTH - _RIGHT} {points[0].split()[1]}"]
    return Markup('<path class="{}" d="M{}"/>').format(name, "L".join(points))


def _odd_mark(index: int, count: int) -> Markup:
    return Markup('<circle class="odd" cx="{:.0f}" cy="{}" r="3"/>').format(_x(index, count), _TOP)


def _label(x: float, y: float, text: str, anchor: str = "start", name: str = "") -> Markup:
    return Markup('<text class="{}" x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>').format(
        name, x, y, anchor, text
    )


def _axis(low: int, high: int) -> Markup:
    """Horizontal lines at powers of ten, every second or third where there are many."""
    stride = max(1, math.ceil((high - low) / 5))
    marks = []
    for exponent in range(high, low - 1, -stride):
        y = _y(10.0**exponent, low, high)
        marks.append(
            Markup('<path class="grid" d="M{} {:.0f}H{}"/>').format(_LEFT, y, _WIDTH - _RIGHT)
        )
        marks.append(_label(_LEFT - 5, y + 4, f"1e{exponent}" if exponent else "1", "end"))
    marks.append(
        Markup('<path class="axis" d="M{} {}H{}"/>').format(_LEFT, _FLOOR, _WIDTH - _RIGHT)
    )
    marks.append(_label(_LEFT, _HEIGHT - 6, "first position"))
    marks.append(_label(_WIDTH - _RIGHT, _HEIGHT - 6, "last position", "end"))
    return Markup("").join(marks)


_ROW = 30  # height of an arm's row
_NAMES = 130  # width that names of arms take
_FIGURES = 190  # and their figures
_MOST_NAME = 18


def score_words(arm: ArmScore) -> str:
    """A score with its interval: ``0.9533 [0.9296, 0.9708]``."""
    low, high = arm.interval
    return f"{share(arm.score)} [{share(low)}, {share(high)}]"


def score_chart(arms: Sequence[ArmScore]) -> Markup:
    """One row an arm: its score as a dot, its 95 % interval as a line, floors as ticks."""
    ends = [v for a in arms for v in (*a.interval, *((a.floor,) if a.floor is not None else ()))]
    low, high = _ends(min(ends), max(ends))
    left, right = _NAMES, _WIDTH - _FIGURES
    height = len(arms) * _ROW + 26

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    shapes = [_score_axis(low, high, x, height - 20)]
    for place, arm in enumerate(arms):
        y = place * _ROW + _ROW // 2
        shapes.append(
            Markup(
                '<path class="span" d="M{:.1f} {}H{:.1f}"/><circle class="{}" cx="{:.1f}"'
            ).format(x(arm.interval[0]), y, x(arm.interval[1]), arm.outcome, x(arm.score))
            + Markup(' cy="{}" r="5"/>').format(y)
        )
        if arm.floor is not None:
            shapes.append(
                Markup('<path class="limit" d="M{:.1f} {}V{}"/>').format(
                    x(arm.floor), y - 10, y + 10
                )
            )
        name = printable(arm.name)
        shown = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"
        shapes.append(_label(left - 10, y + 4, shown, "end"))
        shapes.append(_label(right + 12, y + 4, score_words(arm), name="figure"))
    told = "; ".join(
        f"{printable(arm.name)} {score_words(arm)}"
        + ("" if arm.floor is None else f", floor {share(arm.floor)}")
        for arm in arms
    )
    return Markup(
        '<svg class="chart" role="img" aria-label="scores with 95 % intervals: {}"'
        ' viewBox="0 0 {} {}">{}</svg>'
    ).format(told, _WIDTH, height, Markup("").join(shapes))


def _ends(low: float, high: float) -> tuple[float, float]:
    """What the axis of scores reaches from and to: hundredths, never none."""
    first, last = math.floor(low * 100 - 0.5) / 100, math.ceil(high * 100 + 0.5) / 100
    return (first, last) if last > first else (first, first + 0.01)


def _score_axis(low: float, high: float, x: Callable[[float], float], floor: int) -> Markup:
    """Vertical lines at about five round scores between 0 and 1."""
    step = next(one for one in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1e9) if (high - low) / one <= 6)
    marks = []
    for tick in range(math.ceil(low / step), math.floor(high / step) + 1):
        value = tick * step
        if 0 <= value <= 1:
            marks.append(Markup('<path class="grid" d="M{:.1f} 0V{}"/>').format(x(value), floor))
            marks.append(_label(x(value), floor + 15, f"{value:.2f}", "middle"))
    return Markup("").join(marks)
