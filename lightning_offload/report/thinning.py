"""Makes long steps light: fewer points for a curve and fewer blocks for a lane, with no peak lost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lightning_offload.planning.trace import Span

__all__ = ["OpGroup", "merge_spans", "thin_curve"]


def thin_curve(seconds: npt.NDArray[np.float64], values: npt.NDArray[np.int64], num_bins: int) -> list[int]:
    """Indices of a step curve to draw: of each bin of time the first, lowest, highest and last point.

    Points that repeat the value before them are left out first.

    Args:
        seconds: When each value begins, not decreasing.
        values: The values.
        num_bins: Into how many bins time is cut.
    """
    changes = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    length = float(seconds[-1] - seconds[0])
    if len(changes) <= 4 * num_bins or length <= 0:
        return _with_last([int(i) for i in changes], len(values) - 1)
    bins = np.minimum((seconds[changes] - seconds[0]) / length * num_bins, num_bins - 1).astype(np.int64)
    cuts = np.flatnonzero(np.diff(bins)) + 1
    chosen: list[int] = []
    for group in np.split(changes, cuts):
        lowest, highest = group[np.argmin(values[group])], group[np.argmax(values[group])]
        chosen.extend(sorted({int(group[0]), int(lowest), int(highest), int(group[-1])}))
    return _with_last(chosen, len(values) - 1)


def _with_last(indices: list[int], last: int) -> list[int]:
    return indices if indices[-1] == last else [*indices, last]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Spans of one lane and kind that are drawn as one.

    Attributes:
        start_seconds: Where the first begins.
        end_seconds: Where the last ends.
        busy_seconds: The sum of their durations.
        num_bytes: The sum of their sizes.
        num_spans: How many they are.
        first: The first of them.
        last: The last of them.
        name: The op that takes most of the time.
    """

    start_seconds: float
    end_seconds: float
    busy_seconds: float
    num_bytes: int
    num_spans: int
    first: Span
    last: Span
    name: str


def merge_spans(spans: Iterable[Span], min_seconds: float) -> list[OpGroup]:
    """Merge neighbours that are too short to be seen on their own, across gaps that are too.

    Args:
        spans: Of one lane, by start.
        min_seconds: What can be seen.

    Returns:
        At most two blocks for each ``min_seconds`` of the time that they span.
    """
    blocks: list[OpGroup] = []
    group: list[Span] = []
    for span in spans:
        if group and (_is_wide(group, min_seconds) or span.start_seconds - group[-1].end_seconds >= min_seconds):
            blocks.append(_block(group))
            group = []
        if group and span.seconds >= min_seconds:
            blocks.append(_block(group))
            group = []
        group.append(span)
    return [*blocks, _block(group)] if group else blocks


def _is_wide(group: list[Span], min_seconds: float) -> bool:
    return group[-1].end_seconds - group[0].start_seconds >= min_seconds


def _block(group: list[Span]) -> OpGroup:
    seconds: Counter[str] = Counter()
    for span in group:
        seconds[span.name] += span.seconds  # type: ignore[assignment]  # a Counter adds up floats too
    return OpGroup(
        start_seconds=group[0].start_seconds,
        end_seconds=group[-1].end_seconds,
        busy_seconds=sum(span.seconds for span in group),
        num_bytes=sum(span.num_bytes for span in group),
        num_spans=len(group),
        first=group[0],
        last=group[-1],
        name=max(seconds, key=lambda name: seconds[name]),
    )
