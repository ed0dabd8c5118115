"""What steps take where the lengths of batches vary: trials have the longest one, a training has all of them.

A sample of batches of the configured size tells how long each is by the longest: its elements for each sample, by those
of that one. A batch of `n` samples that is half as long is priced as `n / 2` samples of the full length, by what the
planner predicts for these under the budget. For ops that work on each token alone that is the same; attention takes
less, so a short batch is priced too high rather than too low.

A batch is padded to its longest sample, so a batch of twice the size is as long as the longer one of two: where a
batch of the configured size is no longer than `x` with probability `F(x)`, one that is `k` times as large is with
`F(x)^k`. So a larger batch holds more padding, which throughput at the longest does not show.

Shortfall: samples are taken to be drawn independently. A sampler that puts samples of one length together pads less
than this says, and larger batches look worse than they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Lengths"]

_NUM_PRICED = 32
"""Lengths of a sample that are priced: so many quantiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long batches of the configured size are.

    Attributes:
        shares: Of the longest, ascending, above 0 and at most 1.
        size: The configured size.
    """

    shares: tuple[float, ...]
    size: int

    @classmethod
    def of(cls, lengths: Sequence[float], size: int) -> Lengths:
        """Take some lengths, at least one, as a sample."""
        ordered, most = sorted(lengths), max(lengths)
        number = min(_NUM_PRICED, len(ordered))
        middles = (ordered[(2 * place + 1) * len(ordered) // (2 * number)] for place in range(number))
        return cls(shares=tuple(each / most for each in middles), size=size)

    def weights(self, batch_size: int) -> list[float]:
        """How often a batch of a size is of each length."""
        number, power = len(self.shares), batch_size / self.size
        below = [(place / number) ** power for place in range(number + 1)]
        return [high - low for low, high in itertools.pairwise(below)]

    def typical_share(self, batch_size: int, seconds: Callable[[int], float | None]) -> float | None:
        """The seconds of a mean step by those of one with the longest batch.

        Args:
            batch_size: Samples of a step.
            seconds: What a step with so many samples of the full length takes, as planned; None where no plan is
                possible. It is asked for powers of two, and for the size itself.

        Returns:
            None where it cannot be told.
        """
        sizes = [*(1 << power for power in range(batch_size.bit_length()) if 1 << power < batch_size), batch_size]
        known = {size: took for size in sizes if (took := seconds(size)) is not None}
        if batch_size not in known or len(known) < min(2, len(sizes)):
            return None
        mean = sum(
            weight * _between(known, share * batch_size)
            for share, weight in zip(self.shares, self.weights(batch_size), strict=True)
        )
        return mean / known[batch_size] if known[batch_size] > 0 else None


def _between(known: dict[int, float], size: float) -> float:
    """Seconds between those that are known, on straight lines; below the smallest they stay."""
    sizes = sorted(known)
    above = next((each for each in sizes if each >= size), sizes[-1])
    below = max((each for each in sizes if each <= size), default=above)
    if above == below:
        return known[above]
    part = (size - below) / (above - below)
    return math.fsum(((1 - part) * known[below], part * known[above]))
