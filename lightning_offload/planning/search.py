"""What all searches share: choices that were simulated, the best ones so far, and when to stop."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_offload.planning.arrays import Codes
from lightning_offload.planning.plans import Setting
from lightning_offload.planning.simulator import Outcome

_AS_GOOD = 1.0005  # of the lower bound
_HOPELESS = 2.0  # as slow as that multiple of the best, a choice need not be simulated to its end

_MAX_SEEN_BYTES = 32 << 20  # of choices that are remembered, several times that in all

Flags = npt.NDArray[np.bool_]


class Choice(NamedTuple):
    """A choice of actions that was simulated.

    Attributes:
        codes: By candidate: the action's code.
        no_memo: By candidate: whether it is not memoised.
        outcome: What the simulation said.
        is_feasible: Whether it fits the budget and the tiers.
    """

    codes: Codes
    no_memo: Flags
    outcome: Outcome
    is_feasible: bool

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.outcome.step_seconds


class Search:
    """See the module's docstring.

    Args:
        setting: The step, the device, the budget, and how long to search.

    Attributes:
        setting: Likewise.
        best: The fastest feasible choice so far, None before there is one.
        num_trials: Simulations so far.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.best: Choice | None = None
        self.num_trials = 0
        self._limit = setting.budget_bytes
        self._deadline = None if setting.seconds is None else time.perf_counter() + setting.seconds
        self._seen: dict[bytes, Choice] = {}
        self._memoised = np.zeros(len(setting.problem.candidates), dtype=np.bool_)

    @property
    def is_over(self) -> bool:
        """Whether to stop with what there is: time is up, or the best is as good as the lower bound."""
        return self.is_out_of_time or self.is_within(_AS_GOOD)

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time to search is up."""
        return self._deadline is not None and time.perf_counter() >= self._deadline

    def is_within(self, ratio: float) -> bool:
        """Whether the best is at most this multiple of the lower bound."""
        return self.best is not None and self.best.seconds <= ratio * self.setting.relaxed.seconds

    def try_(self, codes: Codes, no_memo: Flags | None = None) -> Choice:
        """Simulate a choice, once."""
        no_memo = self._memoised if no_memo is None else no_memo
        key = codes.tobytes() + np.packbits(no_memo).tobytes()
        choice = self._seen.get(key)
        if choice is None:
            self.num_trials += 1
            most = _HOPELESS * self.best.seconds if self.best is not None else math.inf
            outcome = self.setting.simulator.run(codes, no_memo if no_memo.any() else None, max_seconds=most)
            fits = self._limit is None or outcome.peak_bytes <= self._limit
            fits = fits and outcome.overflow_bytes == 0 and outcome.step_seconds < math.inf
            if len(self._seen) * len(key) > _MAX_SEEN_BYTES:
                self._seen.clear()
            choice = self._seen[key] = Choice(codes.copy(), no_memo.copy(), outcome, fits)
            if fits and (self.best is None or choice.seconds < self.best.seconds):
                self.best = choice
        return choice
