"""What the next step of a kind does, in words, and what may follow on what.

::

    recording --> verifying --> measuring --> planned
        ^             |             |            |
        +-------------+-------------+------------+--> unplanned

Step 1 of a new shape is recorded. Step 2 runs under the first plan, and its replays are verified; step 3 is measured;
the final plan is in force from step 4 on. A plan that needs no recording (of other sizes, of another structure, of the
user) is final at once. A replay that gave other bits goes back to verifying, and so does what changes for good to
recording. *Unplanned* steps have no plan; some of them are recorded to get one.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["idle", "recording", "verifying", "measuring", "planned", "unplanned"]

_FOLLOWING: dict[Phase, frozenset[Phase]] = {
    "recording": frozenset({"recording", "verifying", "planned", "unplanned"}),
    "verifying": frozenset({"recording", "verifying", "measuring", "planned", "unplanned"}),
    "measuring": frozenset({"recording", "verifying", "planned", "unplanned"}),
    "planned": frozenset({"recording", "verifying", "planned", "unplanned"}),
    "unplanned": frozenset({"recording", "planned", "unplanned"}),
}


class Stage:
    """How far a kind of step is.

    Attributes:
        phase: What its next step does.
    """

    __slots__ = ("_phase",)

    def __init__(self, phase: Phase = "recording") -> None:
        self._phase: Phase = phase

    @property
    def phase(self) -> Phase:
        """What the next step does."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Do something else from now on.

        Raises:
            AssertionError: That cannot follow on what was done so far.
        """
        if phase not in _FOLLOWING[self._phase]:
            raise AssertionError(f"a kind of step that is {self._phase} cannot come to be {phase}")
        self._phase = phase
