"""The kinds of step that a memory plugin has met, and the figures of the one that ran last."""

from __future__ import annotations

from collections.abc import Collection

from lightning_offload.plugins.hardware import TierUse
from lightning_offload.plugins.lifecycle import StepKind
from lightning_offload.plugins.peaks import DevicePeaks
from lightning_offload.plugins.report_data import Phase, Report, make_report
from lightning_offload.plugins.run import StepRun


class Ledger:
    """See the module's docstring.

    Attributes:
        kinds: By the signature of their inputs.
        key: Signature of the kind that ran last.
        kind: That kind.
        peaks: What the device's allocator counts.
        tier_use: How much of the lower tiers was in use when the plugin was detached.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, StepKind] = {}
        self.key = ""
        self.kind = StepKind()
        self.peaks = DevicePeaks()
        self.tier_use = TierUse()
        self._phase: Phase = "idle"
        self._num_steps = 0
        self._stall_seconds = 0.0
        self._step_seconds: float | None = None

    def choose(self, key: str) -> StepKind:
        """The kind of the step that is about to begin."""
        self.key = key
        self.kind = self.kinds.setdefault(key, StepKind())
        return self.kind

    def forget(self, keep: Collection[str]) -> None:
        """Drop the kinds whose signatures are not among those to keep."""
        self.kinds = {key: kind for key, kind in self.kinds.items() if key in keep}
        if self.key not in self.kinds:
            self.key, self.kind, self._phase = "", StepKind(), "idle"
            self._stall_seconds, self._step_seconds = 0.0, None

    def begin_step(self) -> None:
        """A step of the chosen kind begins."""
        self._phase = self.kind.phase
        self._num_steps += 1

    def end_step(self, run: StepRun) -> None:
        """Note the figures of a step that ran."""
        if run.seconds is not None:
            self._stall_seconds, self._step_seconds = run.stall_seconds, run.seconds

    def report(
        self, *, budget_bytes: int | None, tier_use: TierUse, optimizer_peak_bytes: int | None, policy: str
    ) -> Report:
        """Figures of the kind of step that ran last."""
        return make_report(
            self.kind,
            budget_bytes=budget_bytes,
            measured_step_seconds=self._step_seconds,
            stall_seconds=self._stall_seconds,
            tier_use=tier_use,
            optimizer_peak_bytes=self.peaks.optimizer_peak_bytes or optimizer_peak_bytes,
            reserved_bytes=self.peaks.reserved_bytes,
            policy=policy,
            num_steps=self._num_steps,
            phase=self._phase,
        )
