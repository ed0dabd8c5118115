"""What was alive at the peak of a step, by the op that made it: for diagnosis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from tests.engine.live_tracker import LiveStorageTracker, Window

KIB = 1024
NUM_LINES = 24


class CensusTracker(LiveStorageTracker):
    """Remembers who made each storage, and who was there when a window rose last."""

    def __init__(self) -> None:
        super().__init__()
        self._censuses: dict[int, Counter[str]] = {}
        self._age = 0
        self._origins: dict[int, tuple[int, str]] = {}
        self._op = ""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        where = "outside" if not self._windows else "backward" if in_backward else "forward"
        self._op = f"{where} {func}"
        return super().__torch_dispatch__(func, types, args, kwargs)

    @override
    def register_all(self) -> None:
        self._op = "registered"
        super().register_all()
        self._age += 1

    @override
    def _follow_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            self._origins[key] = (self._age, self._op)
        super()._follow_storage(storage)

    @override
    def _rise(self, op: str) -> None:
        outermost = self._windows[0] if self._windows else None
        if outermost is not None and self.live_bytes > outermost.peak_bytes:
            census = self._censuses[id(outermost)] = Counter()
            for key, (_, num_bytes) in self._live.items():
                age, origin = self._origins[key]
                census[origin if age == self._age else f"(before) {origin}"] += num_bytes
        super()._rise(op)

    def census_of(self, window: Window) -> Counter[str]:
        """Bytes that were alive at the peak of an outermost window, by who made them."""
        return self._censuses.get(id(window), Counter())


def describe(census: Counter[str]) -> str:
    """A line for each op that made something, the most bytes first."""
    lines = [f"{num_bytes / KIB:10.1f} KiB  {origin}" for origin, num_bytes in census.most_common(NUM_LINES)]
    return "\n".join(lines)
