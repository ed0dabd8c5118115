"""How bytes and seconds of a step depend on its batch size, and on the lengths of what it is given.

Sizes of tensors are polynomials of the batch size ``n`` with whole numbers: nearly all are ``a + b*n``, those of
contrastive losses, which compare each sample with each other one, grow with ``n**2``. So they are fitted exactly, as
fractions, and rounded upwards. Two sizes cannot tell a line that is negative at 0 from a parabola through 0; the
parabola is taken, which is the larger one beyond both sizes.

Where lengths, heights or widths vary, perhaps several at once, a tensor's size is such a polynomial of one
:class:`Feature`: a product of powers of what varies, each perhaps divided first and rounded up, as strided
convolutions and patches do (:class:`ShapeLaws`).

What is measured (workspaces, durations) is not exact. A workspace gets a line that no measurement lies above;
durations get the non-negative least squares of ``a + b*n``, where ``a`` is what launching costs. Ops that touch
storages of ``n**2`` bytes get ``a + b*x`` instead, where ``x`` are the bytes that they touch, known at any size.

Shortfalls: sizes that are neither (cubes of the batch, padding to tiles) get a line that covers what was seen, and may
be wrong elsewhere; a duration that bends (small kernels do not fill a device) is only right near the sizes that were
seen.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil, lcm, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class SizePolynomial(NamedTuple):
    """``(constant + linear*n + square*n**2) / divisor`` bytes, rounded up and not below 0."""

    constant: int
    linear: int = 0
    square: int = 0
    divisor: int = 1

    def at(self, batch_size: int) -> int:
        """Bytes at a batch size."""
        numerator = self.constant + batch_size * (self.linear + batch_size * self.square)
        return max(0, -(-numerator // self.divisor))


_Find = Callable[[Sequence[int], Sequence[int]], SizePolynomial | None]


def exact_bytes(sizes: Sequence[int], seen: Sequence[int]) -> SizePolynomial:
    """The law of a tensor's size; where nothing simple is exact, a line that covers what was seen.

    Args:
        sizes: Batch sizes, ascending; at least two.
        seen: Bytes at each.
    """
    if seen[0] == seen[-1] == max(seen):
        return SizePolynomial(max(seen))
    for law in (_line(sizes, seen), _parabola(sizes, seen)):
        if law is not None:
            return law
    return covering_line(sizes, seen)


def covering_line(sizes: Sequence[int], seen: Sequence[int]) -> SizePolynomial:
    """A line that rises and is not negative at 0, close to what was measured and not below any of it."""
    slope = max(Fraction(0), _slope(sizes, seen))
    start = max(y - slope * n for n, y in zip(sizes, seen, strict=True))
    if start < 0:
        start, slope = Fraction(0), max(Fraction(y, n) for n, y in zip(sizes, seen, strict=True))
    return _law(start, slope, Fraction(0))


def given_bytes(sizes: Sequence[int], seen: Sequence[int]) -> SizePolynomial:
    """The law of bytes that depend on more than the batch: constant, unless three sizes or more make a line."""
    line = _line(sizes, seen) if len(sizes) > 2 else None
    return line if line is not None and line.linear > 0 else SizePolynomial(max(seen))


def is_exact(law: SizePolynomial, sizes: Sequence[int], seen: Sequence[int]) -> bool:
    """Whether a law gives just what was seen."""
    return all(law.at(n) == y for n, y in zip(sizes, seen, strict=True))


def _line(sizes: Sequence[int], seen: Sequence[int]) -> SizePolynomial | None:
    """The line through all that was seen, if there is one and it rises; with two sizes, not below 0 at 0."""
    slope = Fraction(seen[-1] - seen[0], sizes[-1] - sizes[0])
    start = seen[0] - slope * sizes[0]
    if slope < 0 or (len(sizes) == 2 and start < 0):
        return None
    if any(start + slope * n != y for n, y in zip(sizes, seen, strict=True)):
        return None
    return _law(start, slope, Fraction(0))


def _parabola(sizes: Sequence[int], seen: Sequence[int]) -> SizePolynomial | None:
    """The rising parabola through all that was seen, if there is one with more to say for it than three points."""
    if len(sizes) == 2:
        start, linear, square = Fraction(0), *_through_zero(sizes, seen)
    else:
        middle = len(sizes) // 2
        picked = [(sizes[i], seen[i]) for i in (0, middle, len(sizes) - 1)]
        start, linear, square = _through(*picked)
    is_supported = start == 0 or len(sizes) > 3 or min(start, linear) >= 0
    is_rising = square > 0 and linear + 2 * square * sizes[0] >= 0
    if not is_supported or not is_rising:
        return None
    law = _law(start, linear, square)
    return law if is_exact(law, sizes, seen) else None


def _through_zero(sizes: Sequence[int], seen: Sequence[int]) -> tuple[Fraction, Fraction]:
    first, last = Fraction(seen[0], sizes[0]), Fraction(seen[-1], sizes[-1])
    square = (last - first) / (sizes[-1] - sizes[0])
    return first - square * sizes[0], square


def _through(*points: tuple[int, int]) -> tuple[Fraction, Fraction, Fraction]:
    """Coefficients of the parabola through three points, by divided differences."""
    (n0, y0), (n1, y1), (n2, y2) = points
    first, second = Fraction(y1 - y0, n1 - n0), Fraction(y2 - y1, n2 - n1)
    square = (second - first) / (n2 - n0)
    linear = first - square * (n0 + n1)
    return y0 - n0 * (linear + square * n0), linear, square


def _slope(sizes: Sequence[int], seen: Sequence[int]) -> Fraction:
    """Slope of the least-squares line."""
    count, mean = len(sizes), Fraction(sum(sizes), len(sizes))
    spread = sum((n - mean) ** 2 for n in sizes)
    return (
        sum(((n - mean) * (y - Fraction(sum(seen), count)) for n, y in zip(sizes, seen, strict=True)), Fraction())
        / spread
    )


def _law(start: Fraction, linear: Fraction, square: Fraction) -> SizePolynomial:
    divisor = lcm(start.denominator, linear.denominator, square.denominator)
    return SizePolynomial(ceil(start * divisor), int(linear * divisor), int(square * divisor), divisor)


Point = tuple[int, ...]
"""What a step may vary in: its batch size alone, or several numbers, such as two lengths."""

_DIVISORS = (2, 4, 8, 16, 32, 64)  # by strides, patches and heads
_MAX_DEGREE = 4  # of heights equal to widths, in attention between patches
_MAX_POWER = 2  # of one of several
_NUM_TELLING = 3  # values of a feature that make a law more than a guess
_CLOSE = 1e-9  # relative: a law is exact, or none


def _divided(number: int, divisor: int) -> int:
    """Rounded up."""
    return -(-number // divisor)


class Feature(NamedTuple):
    """What a tensor's size may depend on: the product of ``ceil(x / divisor) ** power`` over what varies."""

    powers: tuple[int, ...]
    divisors: tuple[int, ...]

    def at(self, point: Point) -> int:
        """Its value."""
        return prod(_divided(x, d) ** p for x, p, d in zip(point, self.powers, self.divisors, strict=True) if p)


class SizeLaw(NamedTuple):
    """Bytes as a polynomial of a feature."""

    feature: Feature
    polynomial: SizePolynomial

    def at(self, point: Point) -> int:
        """Bytes at a point."""
        return self.polynomial.at(self.feature.at(point))


@functools.cache
def features_of(num_varying: int) -> tuple[Feature, ...]:
    """All features of so many varying numbers, the simplest first."""
    highest = _MAX_DEGREE if num_varying == 1 else _MAX_POWER
    found = []
    for powers in itertools.product(range(highest + 1), repeat=num_varying):
        if not 1 <= sum(powers) <= _MAX_DEGREE:
            continue
        used = [i for i, power in enumerate(powers) if power]
        found.append(Feature(powers, (1,) * num_varying))
        for count in range(1, len(used) + 1):
            for divided in itertools.combinations(used, count):
                for divisor in _DIVISORS:
                    divisors = tuple(divisor if i in divided else 1 for i in range(num_varying))
                    found.append(Feature(powers, divisors))
    return tuple(sorted(found, key=lambda f: (max(f.divisors) > 1, sum(f.powers), max(f.powers), f.divisors)))


class ShapeLaws:
    """Finds the laws of tensors' sizes where shapes vary.

    Args:
        points: What varied in the steps that were seen; at least two points, all different.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._features = features_of(len(points[0]))
        self._values: Floats = np.array([[f.at(p) for p in points] for f in self._features], dtype=np.float64)
        self._is_telling = np.array([len(set(row)) >= _NUM_TELLING for row in self._values.tolist()])
        self._is_simple = np.array([max(f.divisors) == 1 for f in self._features])
        self._is_one = self._is_simple & np.array([sum(f.powers) == 1 for f in self._features])
        rows = np.arange(len(self._features))
        self._low, self._high = self._values.argmin(axis=1), self._values.argmax(axis=1)
        self._lowest = self._values[rows, self._low]
        self._spread = self._values[rows, self._high] - self._lowest

    def __call__(self, seen: Sequence[int]) -> SizeLaw:
        """The law of a size; where nothing simple is exact, a line that covers what was seen.

        In this order: a constant, a multiple of a feature, a line on a feature that has three values or more, a
        parabola on one varying number, a line through two values.

        Args:
            seen: Bytes at each point.
        """
        if min(seen) == max(seen):
            return SizeLaw(self._features[0], SizePolynomial(seen[0]))
        sizes = np.array(seen, dtype=np.float64)
        ratios = sizes / self._values
        is_multiple = np.ptp(ratios, axis=1) <= _CLOSE * ratios.max(axis=1)
        rise = sizes[self._high] - sizes[self._low]
        slope = np.divide(rise, self._spread, out=np.zeros(len(rise)), where=self._spread > 0)
        lines = sizes[self._low][:, None] + slope[:, None] * (self._values - self._lowest[:, None])
        is_line = (slope > 0) & (np.abs(lines - sizes) <= _CLOSE * sizes.max()).all(axis=1)
        for find, chosen in (
            (_multiple, is_multiple & (self._is_simple | self._is_telling)),
            (_line, is_line & self._is_telling),
            (_parabola, self._is_one),
            (_line, is_line & self._is_simple),
        ):
            for i in np.flatnonzero(chosen):
                law = self._on(self._features[i], find, seen)
                if law is not None and all(law.at(p) == y for p, y in zip(self._points, seen, strict=True)):
                    return law
        steadiness = ratios.max(axis=1) / np.maximum(ratios.min(axis=1), _CLOSE)
        best = self._features[int(np.argmin(np.where(self._is_simple, steadiness, np.inf)))]
        return self._on(best, covering_line, seen) or SizeLaw(best, SizePolynomial(max(seen)))

    def _on(
        self,
        feature: Feature,
        find: Callable[[Sequence[int], Sequence[int]], SizePolynomial | None],
        seen: Sequence[int],
    ) -> SizeLaw | None:
        """The law that is found of a feature's values, of several sizes at one of them the largest."""
        known: dict[int, int] = {}
        for point, num_bytes in zip(self._points, seen, strict=True):
            value = feature.at(point)
            known[value] = max(known.get(value, 0), num_bytes)
        if len(known) < 2:
            return None
        values = sorted(known)
        polynomial = find(values, [known[value] for value in values])
        return SizeLaw(feature, polynomial) if polynomial is not None else None


def _multiple(sizes: Sequence[int], seen: Sequence[int]) -> SizePolynomial:
    return _law(Fraction(0), Fraction(seen[-1], sizes[-1]), Fraction(0))


class DurationFit(NamedTuple):
    """By op: ``constant + rise * x`` seconds, with ``x`` the batch size or what else the op grows with."""

    constant: Floats
    rise: Floats

    def at(self, x: Floats) -> Floats:
        """Seconds of each op, given its ``x``."""
        return self.constant + self.rise * x


def fit_seconds(x: Floats, seen: Floats, is_plain: npt.NDArray[np.bool_]) -> DurationFit:
    """Fit the durations of all ops.

    No op takes longer on a smaller batch, and clocks err upwards (the first step at all is a cold one), so where one
    seems to, what it took on the larger batch counts.

    Where the constraint that nothing is negative has changed some of them, all that grow with the batch size are
    scaled so that their sums keep to the least squares of what was seen in all: noise would otherwise make the sum too
    large, since it is cut on one side only.

    Args:
        x: What an op grows with, by size, ascending, and op. There are at least two sizes.
        seen: Seconds, by size and op.
        is_plain: By op: whether it grows with the batch size.
    """
    constant, rise = _non_negative_lines(x, _without_falls(seen))
    plain = np.flatnonzero(is_plain)
    if len(plain):
        total = _without_falls(seen[:, plain].sum(axis=1, keepdims=True))
        start, slope = _non_negative_lines(x[:, plain[:1]], total)
        constant[plain] = _scaled(constant[plain], float(start[0]))
        rise[plain] = _scaled(rise[plain], float(slope[0]))
    return DurationFit(constant, rise)


def _without_falls(seen: Floats) -> Floats:
    """By column: the largest values that are not above what was seen and never fall."""
    result: Floats = np.minimum.accumulate(seen[::-1])[::-1]
    return result


def _non_negative_lines(x: Floats, seen: Floats) -> tuple[Floats, Floats]:
    """By column that never falls: start and slope of least squares that are not negative; the slope never is.

    Where what a column grows with is the same everywhere, its mean is its start.
    """
    mean, centred = seen.mean(axis=0), x - x.mean(axis=0)
    spread = (centred**2).sum(axis=0)
    slope = np.divide((centred * seen).sum(axis=0), spread, out=np.zeros_like(mean), where=spread > 0)
    slope = np.maximum(slope, 0.0)
    start = mean - slope * x.mean(axis=0)
    through_zero = (x * seen).sum(axis=0) / np.maximum((x**2).sum(axis=0), np.finfo(np.float64).tiny)
    return np.maximum(start, 0.0), np.where(start < 0, through_zero, slope)


def _scaled(parts: Floats, total: float) -> Floats:
    """The parts, scaled to a sum; as they are where that is their sum already, or where there is nothing to scale."""
    have = float(parts.sum())
    if have <= 0 or abs(have - total) <= 1e-9 * have:
        return parts
    result: Floats = parts * (total / have)
    return result
