"""A published figure and ours, side by side.

Protocol: a row function returns figures; the suite stores them in the result's config, where tables are made from
them, and as rows of the usual kind, `..._claimed` having no goal of its own: more may be better, less may be, or
nothing but the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.results import Row
from lightning_offload.units import format_bytes

Better = Literal["same", "more", "less"]
Unit = Literal["bytes", "count", "ratio", "share"]
How = Literal["layers", "fake capture", "simulation"]

_SAME_WITHIN = 1e-3
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
        unit: Bytes, a count, a ratio or a share of the plain step time.
        claim: The published value; None where ours merely explains another row.
        ours: What we get.
        better: Whether more or less is better than the claim, or only the same value is right.
        how: `layers`: counted on a network of layers, exact; `fake capture`: our planner's floor on a recorded step,
            exact in bytes; `simulation`: a planned step on modelled op times.
        note: What a reader has to know, above all why the two differ.
    """

    system: str
    what: str
    setting: str
    unit: Unit
    claim: float | None
    ours: float
    better: Better
    how: How
    note: str = ""

    @property
    def case(self) -> str:
        """Name among the result's rows."""
        return f"{self.system}: {self.what}, {self.setting}"

    @property
    def verdict(self) -> str:
        """How ours stands to the claim, in a word or two."""
        if self.claim is None:
            return ""
        difference = self.ours - self.claim
        if abs(difference) <= _SAME_WITHIN * abs(self.claim):
            return "the same"
        if self.unit == "share":
            text = f"{100 * difference:+.1f} points"
        else:
            text = f"{100 * difference / self.claim:+.1f}%"
        if self.better == "same":
            return f"differs, {text}"
        return f"{'beaten' if (difference > 0) == (self.better == 'more') else 'not reached'}, {text}"

    def rows(self) -> list[Row]:
        """Return the figure as rows of a result."""
        claimed, ours = _METRICS[self.unit]
        rows = [Row(case=self.case, metric=ours, value=self.ours)]
        return rows if self.claim is None else [Row(case=self.case, metric=claimed, value=self.claim), *rows]

    def cells(self) -> tuple[str, ...]:
        """Return the figure as a line of a table, in the order of :data:`HEADER`."""
        claim = "" if self.claim is None else self._text(self.claim)
        return (self.system, self.what, self.setting, claim, self._text(self.ours), self.verdict, self.how, self.note)

    def _text(self, value: float) -> str:
        if self.unit == "bytes":
            return f"{value / _MIB:,.2f} MiB" if value < _GIB * 4 else format_bytes(round(value))
        if self.unit == "count":
            return f"{value:,.0f}"
        return f"{100 * value:+.1f}%" if self.unit == "share" else f"{value:.2f}x"


HEADER = ("system", "figure", "setting", "published", "ours", "verdict", "how", "note")
"""Names of a line's cells."""


def encode(figure: Figure) -> dict[str, Any]:
    """Return the figure ready for JSON."""
    return asdict(figure)


def decode(data: dict[str, Any]) -> Figure:
    """Return the figure that :func:`encode` wrote."""
    return Figure(**data)
