"""Which planned steps have their memory counted, and which that keep everything go without hooks.

One plan's memory does not change from step to step, and counting costs host time (on a CPU a counted step of tiny ops
takes nine times as long as others: Python sees each of its ops). So the first two steps that can be are counted, under
each plan, then one after 28 to 32, and after each the distance doubles, up to one in 512. Where sizes vary, several
plans share a schedule, which stays at one in 28 to 32. Where structures change more are counted: the first twelve, then
one in 9 to 13, and after a hundred one in 28 to 32. The distance varies, so that steps that come in turns do not
evade it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Varying = Literal["sizes", "structures"]

_SELDOM, _OFTEN = 32, 13
_NUM_FIRST = 2
_NUM_DOUBLINGS = 4  # of the distance under one plan: then counting takes below 2% of the host's time
_NUM_FIRST_CHANGING, _NUM_SOON_CHANGING = 12, 96
_NUM_ALIKE = 3


@dataclasses.dataclass(slots=True)
class SamplingSchedule:
    """Which steps have their memory counted.

    Attributes:
        num_steps: Steps so far.
        num_uncounted: Those since the last one that was counted.
        num_counted: Those that were.
        num_fresh: Those of them under the plan in force.
    """

    num_steps: int = 0
    num_uncounted: int = 0
    num_counted: int = 0
    num_fresh: int = 0

    def begin_anew(self) -> None:
        """Steps are under another plan from now on."""
        self.num_fresh = 0

    def is_due(self, varying: Varying | None = None) -> bool:
        """Whether the coming step is one to count.

        Args:
            varying: What of steps varies; None where they are alike.
        """
        is_changing = varying == "structures"
        sooner = self.num_counted**2 % 5
        if self.num_fresh < _NUM_FIRST or (is_changing and self.num_counted < _NUM_FIRST_CHANGING):
            return True
        if varying is None:
            return self.num_uncounted + 1 >= (_SELDOM << min(self.num_fresh - _NUM_FIRST, _NUM_DOUBLINGS)) - sooner
        is_soon = is_changing and self.num_steps < _NUM_SOON_CHANGING
        return self.num_uncounted + 1 >= (_OFTEN if is_soon else _SELDOM) - sooner

    def begin_step(self, *, is_counted: bool) -> None:
        """The coming step begins, and is counted or not."""
        self.num_steps += 1
        self.num_uncounted = 0 if is_counted else self.num_uncounted + 1
        self.num_counted += is_counted
        self.num_fresh += is_counted


@dataclasses.dataclass(slots=True)
class HookElision:
    """Which steps that keep everything go without hooks: those after some that were alike.

    As many autograd nodes may save more than they did (a longer sequence, a layer that is trained from now on), which
    hooks alone tell: so one step in 32 has them.

    Attributes:
        num_nodes: Autograd nodes that each step made so far; None while there was none that kept all.
        num_alike: Steps in a row that made so many.
        num_unhooked: Those since then that had no hooks.
        has_varied: Whether one made another number.
    """

    num_nodes: int | None = None
    num_alike: int = 0
    num_unhooked: int = 0
    has_varied: bool = False

    def elides(self, *, has_ample_room: bool) -> bool:
        """Whether the coming step has none.

        Args:
            has_ample_room: Whether there is room for several times what was planned for: they need not be alike then.
        """
        if (self.has_varied and not has_ample_room) or self.num_alike < _NUM_ALIKE:
            return False
        self.num_unhooked = (self.num_unhooked + 1) % _SELDOM
        return self.num_unhooked != 0

    def note(self, num_nodes: int | None) -> None:
        """A step made so many autograd nodes; None where that is not known."""
        if num_nodes is None:
            return
        if self.num_nodes not in (None, num_nodes):
            self.has_varied = True
        self.num_nodes, self.num_alike = num_nodes, self.num_alike + 1

    def restart(self) -> None:
        """Steps are others from now on."""
        self.num_nodes, self.num_alike = None, 0
