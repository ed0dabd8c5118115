"""The largest batch that fits, from few trials.

Each trial says whether a batch fitted and, where it knows, how many bytes a step of that size needs at least. Need
grows by about the same bytes with each sample, so a straight line through what is known tells where the cap will
be reached; between the largest batch that fitted and the smallest that did not, halving finishes the work.

Known shortfall: the result is within two per cent, not exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_TOLERANCE = 0.02
_MAX_GROWTH = 4
_MAX_TRIALS = 10
_MAX_PREDICTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one trial showed.

    Attributes:
        fits: Whether a step of this size ran.
        need_bytes: What such a step needs at least; None if that is not known.
    """

    fits: bool
    need_bytes: int | None = None

    @classmethod
    def of(cls, outcome: dict[str, Any]) -> Trial:
        """Read what a trial's process returned."""
        return cls(fits=outcome["fits"], need_bytes=outcome.get("need_bytes"))


@dataclass(slots=True, kw_only=True)
class BatchSearch:
    """See the module's docstring.

    Attributes:
        cap_bytes: What a step may need.
        first: The size to try first.
        trials: What was found out, by size.
    """

    cap_bytes: int
    first: int
    trials: dict[int, Trial] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The largest batch that fitted; 0 before there is one."""
        return max((size for size, trial in self.trials.items() if trial.fits), default=0)

    @property
    def ceiling(self) -> int | None:
        """The smallest batch that did not fit; None before there is one."""
        return min((size for size, trial in self.trials.items() if not trial.fits), default=None)

    def next(self) -> int | None:
        """The size to try next; None when the search has ended."""
        if not self.trials:
            return self.first
        low, high = self.best, self.ceiling
        if high is not None and high - low <= max(1, int(_TOLERANCE * low)):
            return None
        if low and len(self.trials) >= _MAX_TRIALS:
            return None
        top = high - 1 if high is not None else low * _MAX_GROWTH
        wanted = self._predicted()
        if wanted is None or (high is not None and wanted >= high):  # a line that a trial has refuted
            wanted = (low + high) // 2 if high is not None else 2 * low
        return min(max(wanted, low + max(1, int(_TOLERANCE * low) if high is None else 1)), top)

    def _predicted(self) -> int | None:
        """Where the line through the two largest known needs meets the cap, or the one through zero."""
        known = sorted((size, trial.need_bytes) for size, trial in self.trials.items() if trial.need_bytes)
        if not 0 < len(known) <= _MAX_PREDICTED:  # lines that have not met the cap by then will not
            return None
        last_size, last_need = known[-1]
        assert last_need is not None
        slope = last_need / last_size
        if len(known) > 1:
            size, need = known[-2]
            assert need is not None
            slope = (last_need - need) / (last_size - size)
        if slope <= 0:
            return None
        return int(last_size + (self.cap_bytes - last_need) / slope)
