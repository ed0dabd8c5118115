"""What becomes of a specialization whose ops are not always the same.

A step that leaves its plan is recorded anew once: it may have been a change for good, of a layer that is trained from
now on. The second one shows that structures change. From then on steps *align*: they follow the plan for the widest
recorded structure (:mod:`~lightning_offload.plugins.step_variants`), each as far as it can. Where steps have much more
than that they are recorded again, soon at first, then more seldom; where they come in turns, one of those is.

None of this is for good. Steps that follow their plan make up for those that did not, 32 for each. Where 32 steps in a
row are alike, the structure may have come to rest, and gets a plan of its own; where nothing can be planned, it is
tried again after 32 steps. Each time that was in vain twice as many are waited for.

Specializations that differ in sizes share what is known of their structures, once some steps under extrapolated plans
did not follow these, or too few of the recorded ones are alike: then all their steps align.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Literal

from lightning_offload.plugins.plain_steps import PlainNeed
from lightning_offload.plugins.sampling_schedule import SamplingSchedule
from lightning_offload.plugins.step_variants import StepVariants
from lightning_offload.runtime.ledger import Ledger

_MAX_RECORDED = 1  # deviations after which the next step is recorded
_MAX_EXTRAPOLATED = 3  # those of steps of several sizes after which all that differ in sizes follow one structure
_TYPICAL = 0.7  # of the largest size: steps that are recorded, since what they have is resized to others
_MAX_FAILED = 3  # recordings that came to nothing
_FORGIVEN = 32  # steps that follow their plan, for one that did not
_FIRST_WAIT, _LAST_WAIT = 32, 1024  # steps before planning is tried again; it doubles
_NUM_TURNS = 3  # steps at equal distances that show that they come in turns
_MUCH = 0.02  # of what the widest structure saves

Next = Literal["record", "align", "unplan"]
"""What the next steps do: one is recorded, they follow the plan for another structure, or they have no plan."""


@dataclasses.dataclass(slots=True)
class StructureChanges:
    """What is known of how the structure of a specialization changes.

    Attributes:
        variants: The structures that it was recorded with.
        aligns: Whether its steps follow the plan for the widest of these.
        num_deviations: Steps that left their plan, but for those that others have made up for.
        num_followed: Steps that followed it since the last of them.
        num_failed: Recordings without a backward, or in which an optimizer made its state.
        num_unplanned: Steps without a plan since the last recording.
        wait: How many steps are waited for until the next attempt at a plan for one structure alone.
        is_retried: Whether it had no plan, and is recorded to get one.
        fingerprint: Of what the last step that aligned saved.
        num_same: Steps in a row of which it is the same.
        num_apart: Steps that had much more than the plan, since the last recording.
        patience: How many of these there are until the next one.
        num_begun: Steps that began.
        apart_at: Which of them left their plan, or had much more, lately.
        record_in: Steps before the one that is recorded; None for none.
        spans_sizes: Whether it is of all specializations that differ in sizes.
        sampling_schedule: Which steps that follow no plan of their own have their memory counted.
        has_told: Whether a warning said that some of the steps can have no plan.
        has_warned: Whether one said that no plan is within the budget any more.
        margins: By size: by how much measured peaks exceeded predicted ones.
        counted_sizes: Sizes of which a step had its memory counted.
        search_seconds: What a thorough search for a plan takes; a guess before there was one.
        plain: What steps of all these need where they keep everything.
    """

    variants: StepVariants = dataclasses.field(default_factory=StepVariants)
    aligns: bool = False
    num_deviations: int = 0
    num_followed: int = 0
    num_failed: int = 0
    num_unplanned: int = 0
    wait: int = _FIRST_WAIT
    is_retried: bool = False
    fingerprint: int = 0
    num_same: int = 0
    num_apart: int = 0
    patience: int = 1
    num_begun: int = 0
    apart_at: tuple[int, ...] = ()
    record_in: int | None = None
    spans_sizes: bool = False
    sampling_schedule: SamplingSchedule = dataclasses.field(default_factory=SamplingSchedule)
    has_told: bool = False
    has_warned: bool = False
    margins: dict[float, int] = dataclasses.field(default_factory=dict)
    counted_sizes: set[float] = dataclasses.field(default_factory=set)
    search_seconds: float = 1.0
    plain: PlainNeed = dataclasses.field(default_factory=PlainNeed)

    def deviated(self) -> Next:
        """A step left its plan; what the next ones do."""
        self.num_deviations += 1
        self.num_followed = 0
        self._note_apart()
        most = _MAX_EXTRAPOLATED if self.spans_sizes else _MAX_RECORDED
        if self.num_deviations <= most or not len(self.variants):
            return "record"
        self.begin_aligning()
        return "align"

    def begin_aligning(self) -> None:
        """Steps follow the plan for the widest structure from now on."""
        if not self.aligns:
            self.aligns, self.sampling_schedule = True, SamplingSchedule()

    def followed(self) -> None:
        """A step followed the plan for its own structure, which makes up for earlier ones that did not."""
        if not self.num_deviations:
            return
        self.num_followed += 1
        if self.num_followed >= _FORGIVEN:
            self.num_deviations, self.num_followed = self.num_deviations - 1, 0

    def aligned(self, step: Ledger, saved_bytes: int) -> Next | None:
        """A step followed the plan for another structure; what the next ones do, if not the same.

        Args:
            step: What decided about its saves.
            saved_bytes: What the plan's structure saves.
        """
        fingerprint = step.places_fingerprint if self.spans_sizes else step.fingerprint
        self.num_same = self.num_same + 1 if fingerprint == self.fingerprint else 0
        self.fingerprint = fingerprint
        if self.num_same > self.wait:
            self._wait_longer()
            self.aligns, self.num_same = False, 0
            self.num_deviations = _MAX_EXTRAPOLATED if self.spans_sizes else _MAX_RECORDED
            self.margins.clear()
            self.counted_sizes.clear()
            return "record"
        if step.astray_bytes > _MUCH * saved_bytes:
            self._note_apart()
            if self.num_apart >= self.patience and self.record_in is None:
                self.num_apart, self.patience = 0, min(2 * self.patience, _LAST_WAIT)
                gaps = [later - earlier for earlier, later in itertools.pairwise(self.apart_at)]
                self.record_in = gaps[-1] - 1 if len(gaps) > 1 and len(set(gaps)) == 1 else 0
        return None

    def begins(self, *, is_planned: bool, size: float = 1.0) -> Next | None:
        """A step begins; what it does, if not what was planned for it.

        Args:
            is_planned: Whether there is, or will be, a plan for it.
            size: Its size, as a part of the largest.
        """
        self.num_begun += 1
        if is_planned:
            if self.record_in is None or (self.record_in == 0 and size < _TYPICAL):
                return None
            self.record_in = self.record_in - 1 if self.record_in else None
            return "record" if self.record_in is None else None
        self.num_unplanned += 1
        if self.num_unplanned <= self.wait:
            return None
        self.num_unplanned = 0
        self._wait_longer()
        self.num_deviations = min(self.num_deviations, _MAX_RECORDED)
        self.num_failed = min(self.num_failed, _MAX_FAILED - 1)
        self.is_retried = True
        self.variants.reconsider()
        return "record"

    def failed(self) -> Next:
        """A recording came to nothing; what the next steps do."""
        self.num_failed += 1
        return "record" if self.num_failed < _MAX_FAILED else "unplan"

    def gives_up(self) -> Next | None:
        """No plan can be made; what is done rather than to end a training that ran until now; None for nothing.

        Where structures change, a narrower one is planned for.
        """
        if self.aligns and self.variants.give_up_widest():
            return "align"
        if not (self.is_retried or self.aligns):
            return None
        self.aligns = self.is_retried = False
        return "unplan"

    def note_margin(self, num_bytes: int, size: float) -> None:
        """Steps of a size were seen to need so much more than predicted."""
        self.margins[size] = max(self.margins.get(size, 0), num_bytes)

    def margin_at(self, size: float) -> int:
        """What steps of a size leave free, by what others needed: smaller ones, and a part of what larger ones did."""
        return max((math.ceil(n * min(1.0, size / known)) for known, n in self.margins.items()), default=0)

    def _note_apart(self) -> None:
        self.num_apart += 1
        self.apart_at = (*self.apart_at, self.num_begun)[-_NUM_TURNS:]

    def _wait_longer(self) -> None:
        self.wait = min(2 * self.wait, _LAST_WAIT)
