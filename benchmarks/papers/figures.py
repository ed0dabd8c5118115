"""A published figure and ours, side by side, and the rule by which one is said to beat the other.

Note [the rule]: a system is held against *its own* baseline and so are we, because frameworks differ in what they need
without any of this: PyTorch frees what is dead and works in place, Caffe keeps a tensor for every output. So there are
two advantages: of the figure itself, and of what it makes of its baseline. The smaller of the two decides. It is
*beaten* where that is more than a hundredth, *matched* within a hundredth, and *not reached* below. What counts the
same thing by the same rules (`better="same"`) is matched where it agrees to a thousandth.

A better figure is *not comparable*, whatever it is, where no baseline is at hand, where something about the paper's
setting is not known, or where ours is simulated: what the papers print was measured. A worse one is not reached all
the same.

Protocol: a row function returns figures; the suite stores them in the result's config, where tables are made from
them, and as rows of the usual kind, `..._claimed` having no goal of its own: more may be better, less may be, or
nothing but the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.results import Row
from lightning_offload.units import format_bytes

Better = Literal["same", "more", "less"]
Unit = Literal["bytes", "count", "ratio", "share"]
How = Literal["layers", "fake capture", "simulation"]
Verdict = Literal["beaten", "matched", "not reached", "not comparable", ""]

_SAME_WITHIN = 1e-3
_MATCHED_WITHIN = 0.01
_METRICS = {
    "bytes": ("claimed_bytes", "ours_bytes"),
    "count": ("num_claimed", "num_ours"),
    "ratio": ("claimed_ratio", "ours_ratio"),
    "share": ("claimed_share", "ours_share"),
}
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of a paper.

    Attributes:
        system: Whose figure.
        what: What was counted.
        setting: Model, batch and memory.
        unit: Bytes, a count, a ratio or a share of the plain figure; the last two are relative to a baseline already.
        claim: The published value; None where ours merely explains another row.
        claim_baseline: The published value without the system, of its own framework; None where there is none.
        ours: What we get.
        baseline: What PyTorch gets without us, in the same memory; None where the value is relative already.
        better: Whether more or less is better than the claim, or only the same value is right.
        how: `layers`: counted on a network of layers, exact; `fake capture`: our planner's floor on a recorded step,
            exact in bytes; `simulation`: a planned step on modelled op times.
        unknown: What is not known of the paper's setting, or makes the two figures different things.
        note: What a reader has to know besides, above all why the two differ.
    """

    system: str
    what: str
    setting: str
    unit: Unit
    claim: float | None
    ours: float
    better: Better
    how: How
    claim_baseline: float | None = None
    baseline: float | None = None
    unknown: str = ""
    note: str = ""

    @property
    def case(self) -> str:
        """Name among the result's rows."""
        return f"{self.system}: {self.what}, {self.setting}"

    @property
    def advantage(self) -> float:
        """How much better ours is, the smaller of both ways to see it: 0.1 for a tenth, negative where it is worse."""
        assert self.claim is not None, f"nothing was published for {self.case}"
        if self.unit == "share":
            found = [_over(1 + self.ours, 1 + self.claim, self.better)]
        else:
            found = [_over(self.ours, self.claim, self.better)]
        if self.claim_baseline and self.baseline:
            found.append(_over(self.ours / self.baseline, self.claim / self.claim_baseline, self.better))
        return min(found)

    @property
    def obstacle(self) -> str:
        """Why a better figure of ours would not beat the published one; empty where it would."""
        if self.how == "simulation":
            return "simulated against measured"
        if self.unknown:
            return self.unknown
        is_relative = self.unit in ("ratio", "share") or (self.claim_baseline is not None and self.baseline is not None)
        return "" if is_relative or self.how == "layers" else "no baseline of the paper's is at hand"

    @property
    def verdict(self) -> Verdict:
        """How ours stands to the claim: Note [the rule]."""
        if self.claim is None:
            return ""
        if self.better == "same":
            if abs(self.ours - self.claim) <= _SAME_WITHIN * abs(self.claim):
                return "matched"
            return "not comparable" if self.obstacle else "not reached"
        if self.advantage < -_MATCHED_WITHIN:
            return "not reached"
        if self.obstacle:
            return "not comparable"
        return "beaten" if self.advantage > _MATCHED_WITHIN else "matched"

    def rows(self) -> list[Row]:
        """Return the figure as rows of a result."""
        claimed, ours = _METRICS[self.unit]
        rows = [Row(case=self.case, metric=ours, value=self.ours)]
        return rows if self.claim is None else [Row(case=self.case, metric=claimed, value=self.claim), *rows]

    def cells(self) -> tuple[str, ...]:
        """Return the figure as a line of a table, in the order of :data:`HEADER`."""
        claim = "" if self.claim is None else self._text(self.claim, self.claim_baseline)
        why = self.obstacle if self.verdict == "not comparable" and self.how != "simulation" else ""
        note = "; ".join(filter(None, (why, self.note)))
        ours = self._text(self.ours, self.baseline)
        return (self.system, self.what, self.setting, claim, ours, self.verdict, self.how, note)

    def _text(self, value: float, baseline: float | None) -> str:
        if not baseline:
            return self._amount(value)
        is_more = self.better == "more"
        ratio, what = (value / baseline, "of") if is_more else (baseline / value, "below")
        return f"{self._amount(value)} ({ratio:.2f}x {what} {self._amount(baseline)})"

    def _amount(self, value: float) -> str:
        if self.unit == "bytes":
            return f"{value / _MIB:,.2f} MiB" if value < _GIB * 4 else format_bytes(round(value))
        if self.unit == "count":
            return f"{value:,.0f}"
        return f"{100 * value:+.1f}%" if self.unit == "share" else f"{value:.2f}x"


def _over(ours: float, claim: float, better: Better) -> float:
    if claim == 0 or ours == 0:
        return 0.0 if ours == claim else (1.0 if (ours > claim) == (better == "more") else -1.0)
    return ours / claim - 1 if better == "more" else claim / ours - 1


HEADER = ("system", "figure", "setting", "published", "ours", "verdict", "how", "note")
"""Names of a line's cells."""
