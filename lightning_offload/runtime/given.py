"""Where a step is in a plan that was made elsewhere, for a step that is like it in all that the plan decides about.

A plan of a laptop's is for the step as it was captured there. The training that takes it logs, scales its loss, keeps
metrics: ops come and go that the plan has nothing to do for, and so do a few saved numbers. What autograd saves is
followed in order, by size. A saved tensor that the plan lets leave must come; one that it keeps may be missing; one of
:data:`TINY_BYTES` or fewer may come in between. Anything else ends the plan, and the step says where.

Unpacks are known by what they unpack, so that copies come back where the plan has them, whatever else is unpacked.

A wrong guess costs memory or time, never exactness: storages are recognised by identity, and calls are replayed that
were recorded in the very step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_offload.graph.memory_plan import Decision
from lightning_offload.graph.step_graph import StepGraph

TINY_BYTES = 1024
"""A saved tensor of so many bytes may come that was not planned: a loss, its scale, a count of tokens."""

_MANY_MISSING = 64  # saved tensors in a row that the plan keeps and the step lacks
_FEW_MISSING = 3  # the same before a tiny one, which looks like any other


@dataclasses.dataclass(frozen=True, slots=True)
class GivenRoute:
    """What a step follows a plan by that was made elsewhere.

    Attributes:
        pack_bytes: By pack: bytes of the storage behind it; 0 where that is on another device.
        matters: By pack: whether what it saves leaves the device.
        modules: By pack: the module that saves it.
        unpacks: By pack: the ordinals of its unpacks.
    """

    pack_bytes: tuple[int, ...]
    matters: tuple[bool, ...]
    modules: tuple[str, ...]
    unpacks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: StepGraph, decisions: dict[int, Decision]) -> GivenRoute:
        """The route of a plan.

        Args:
            graph: The step that it was made for.
            decisions: What leaves the device, by storage.
        """
        storages = [graph.values[save.value].storage for save in graph.saves]
        ordinals: list[list[int]] = [[] for _ in graph.saves]
        ticks = sorted((tick, pack) for pack, save in enumerate(graph.saves) for tick in save.unpack_ticks)
        for ordinal, (_, pack) in enumerate(ticks):
            ordinals[pack].append(ordinal)
        return cls(
            pack_bytes=tuple(graph.storages[storage].num_bytes for storage in storages),
            matters=tuple(storage in decisions for storage in storages),
            modules=tuple(save.module for save in graph.saves),
            unpacks=tuple(map(tuple, ordinals)),
        )


class GivenCursor:
    """Where a step is on a route.

    Attributes:
        place: Packs of the route that are behind.
    """

    def __init__(self, route: GivenRoute) -> None:
        self._route = route
        self._places: dict[int, int] = {}
        self._next_unpack = 0
        self._num_taken = 0
        self.place = 0

    @classmethod
    def on(cls, route: GivenRoute | None) -> GivenCursor | None:
        """Where a step begins on a route; None without one."""
        return cls(route) if route is not None else None

    def refusal(self, num_bytes: int) -> str:
        """What to say of a pack that ends the plan.

        Args:
            num_bytes: Of the storage behind it.
        """
        return f"one of {num_bytes} bytes was saved where {self.expected()}"

    def next(self, index: int, num_bytes: int) -> int | None:
        """The place of a pack; -1 for one that was not planned and does not matter, None where the step left its plan.

        Args:
            index: Its ordinal in the step.
            num_bytes: Of the storage behind it.
        """
        place = self._find(num_bytes)
        if place is not None:
            self.place = place + 1
            self._places[index] = place
            return place
        return -1 if num_bytes <= TINY_BYTES else None

    def _find(self, num_bytes: int) -> int | None:
        planned, matters, place = self._route.pack_bytes, self._route.matters, self.place
        if place < len(planned) and planned[place] in (0, num_bytes):
            return place
        reach = _FEW_MISSING if num_bytes <= TINY_BYTES else _MANY_MISSING
        for ahead in range(place, min(place + reach, len(planned))):
            if planned[ahead] == num_bytes:
                return ahead
            if matters[ahead]:
                break
        return None

    def take_passed(self) -> range:
        """The planned packs that are behind, by place, and were not when this was last asked."""
        passed = range(self._num_taken, self.place)
        self._num_taken = self.place
        return passed

    def is_through(self, num_packs: int) -> bool:
        """Whether none of the first packs that is still to come matters."""
        return not any(self._route.matters[self.place : num_packs])

    def passed_by(self, index: int) -> Sequence[int]:
        """The planned unpacks that are behind once this pack is unpacked, by ordinal, and were not before.

        Args:
            index: The ordinal of the pack in the step.
        """
        ordinals = self._route.unpacks[self._places[index]] if index in self._places else ()
        ordinal = next((ordinal for ordinal in ordinals if ordinal >= self._next_unpack), -1)
        passed = range(self._next_unpack, ordinal + 1)
        self._next_unpack = max(self._next_unpack, ordinal + 1)
        return passed

    def expected(self) -> str:
        """What the plan has next, for messages."""
        if self.place >= len(self._route.pack_bytes):
            return "nothing more was expected"
        return f"one of {self._route.pack_bytes[self.place]} bytes was expected"

    def where(self) -> str:
        """Near which module that is, for messages."""
        module = self._route.modules[self.place] if self.place < len(self._route.modules) else ""
        return f", in `{module}`," if module else ""
