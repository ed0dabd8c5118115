"""Follows a step along its program: which planned op, pack or unpack comes now.

A :class:`Follower` answers in places: positions in the columns of :class:`~.program.Program`. Three strategies:

- :class:`ByOrdinal`, for the structure that the plan was made for: ops by name, packs and unpacks by ordinal. Ops that
  come and go beside the model's own are put up with. Sizes that are bounds admit smaller ones.
- :class:`BySize`, for a plan that was made elsewhere. The training that takes it logs, scales its loss, keeps metrics:
  ops come and go, and so do a few saved numbers. A saved tensor that the plan lets leave must come; one that it keeps
  may be missing; one of :data:`TINY_BYTES` or fewer may come in between. Anything else ends the plan. Unpacks are known
  by what they unpack.
- :class:`ByForm`, for a plan for another structure, which has parts that the step lacks, or lacks some. Packs by types
  and shapes, in order; ops not at all. Nothing ends the plan.

A wrong guess costs memory or time, never exactness: storages are recognised by identity, and calls are replayed that
were recorded in the very step.
"""

from __future__ import annotations

import abc
import sys
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_offload.runtime.program import BUSY, Program
from lightning_offload.runtime.routes import NUM_SURE, NUM_UNIQUE, FormRoute, SizeRoute
from lightning_offload.tensors.saved_forms import SavedForm, form_of

STRAY = -1
"""The place of an op or a pack that was not planned, and ends nothing."""

LEFT = -2
"""The place of one that ends the plan, and of all that come without one."""

MAX_STRAY_OPS = 64
"""So many ops that were not planned may come between planned ones, as those of logging do."""

TINY_BYTES = 1024
"""A saved tensor of so many bytes may come that was not planned: a loss, its scale, a count of tokens."""

_NUM_SURE_OPS = 3  # in a row, by which a step is recognised
_MANY_MISSING = 64  # saved tensors in a row that the plan keeps and the step lacks
_FEW_MISSING = 3  # the same before a tiny one, which looks like any other
_NUM_BORDERS = 8  # among which the one is sought that a step has come by


class Follower(abc.ABC):
    """Where a step is in its program.

    Args:
        program: The program.
        most_stray_ops: Ops that may come that were not planned.

    Attributes:
        refusal: Why the last op or pack has ended the plan.
    """

    follows_ops = True
    """Whether :meth:`op` is to be asked."""

    def __init__(self, program: Program, *, most_stray_ops: int = MAX_STRAY_OPS) -> None:
        self.refusal = ""
        self._program = program
        self._names, self._flags, self._is_strict = program.op_names, program.op_flags, program.is_strict
        self._next_op = 0
        self._most_stray_ops = most_stray_ops
        self._num_stray_ops = 0
        self._stray: list[str] = []  # in a row, the last few

    def op(self, name: str) -> int:
        """The place of the op that is about to run; :data:`STRAY`, or :data:`LEFT` where it ends the plan."""
        if not self._is_strict and torch._C._current_graph_task_id() != -1:
            return STRAY
        place = self._next_op
        if place < len(self._names) and self._names[place] == name:
            self._next_op = place + 1
            if self._stray:
                self._stray.clear()
            return place
        return self._resynchronised(name)

    def _resynchronised(self, name: str) -> int:
        """Skip planned ops for which there is nothing to do, or take this one for a stray.

        Where a few strays in a row are consecutive ops further on, those before them are missing in this step.
        """
        names, end = self._names, min(self._next_op + MAX_STRAY_OPS, len(self._names))
        for place in range(self._next_op, end):
            if names[place] == name:
                self._next_op = place + 1
                return place
            if self._flags[place] & BUSY:
                break
        stray = self._stray = [*self._stray[1 - _NUM_SURE_OPS :], name]
        for place in range(self._next_op + _NUM_SURE_OPS, end) if len(stray) == _NUM_SURE_OPS else ():
            if list(names[place + 1 - _NUM_SURE_OPS : place + 1]) == stray:
                self._next_op, self._stray = place + 1, []
                return place
        self._num_stray_ops += 1
        if self._num_stray_ops <= self._most_stray_ops:
            return STRAY
        self.refuse(name)
        return LEFT

    def go_to(self, place: int) -> None:
        """Go on at an op, up to which the native core has followed."""
        self._next_op = place

    def refuse(self, name: str) -> str:
        """Note that an op ends the plan; the words for it."""
        self.refusal = f"{name} ran where {self._expected_op()} was expected"
        return self.refusal

    def _expected_op(self) -> str:
        return self._names[self._next_op] if self._next_op < len(self._names) else "the end"

    def _lacks_op(self, sees_ops: bool) -> str:
        if sees_ops and any(self._flags[self._next_op : self._program.num_first_ops]):
            return f"forward ended before {self._expected_op()}"
        return ""

    @abc.abstractmethod
    def pack(self, index: int, tensor: Tensor, *, is_plain: bool, num_unpacks: int) -> int:
        """The place of a pack; :data:`STRAY`, or :data:`LEFT` where it ends the plan.

        Args:
            index: Its ordinal in the step.
            tensor: What it saves.
            is_plain: Whether that has a storage of its own that the plan may be about.
            num_unpacks: Unpacks so far.
        """

    @abc.abstractmethod
    def passed_packs(self, index: int) -> Sequence[int]:
        """The planned packs that are behind after a pack, and were not before.

        Args:
            index: The ordinal of the pack in the step.
        """

    @abc.abstractmethod
    def passed_unpacks(self, index: int, ordinal: int) -> Sequence[int]:
        """The planned unpacks that are behind with an unpack, and were not before.

        Args:
            index: The ordinal in the step of the pack that is unpacked.
            ordinal: That of the unpack.
        """

    def lacks(self, num_packs: int, *, sees_ops: bool) -> str:
        """What forward lacked that the plan counts on, where backward begins; "" for nothing.

        Args:
            num_packs: Packs so far.
            sees_ops: Whether ops were seen.
        """
        return ""

    def where(self) -> str:
        """Near which module the step is, for messages; "" where that is not known."""
        return ""


def follower_of(program: Program) -> Follower:
    """What follows a step along a program."""
    if program.form_route is not None:
        return ByForm(program, program.form_route)
    if program.size_route is not None:
        return BySize(program, program.size_route)
    return ByOrdinal(program)


class ByOrdinal(Follower):
    """Follows a step of the structure that was planned."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._pack_bytes, self._is_bound = program.pack_bytes, program.is_bound
        self._keys: dict[int, int] = {}

    @override
    def pack(self, index: int, tensor: Tensor, *, is_plain: bool, num_unpacks: int) -> int:
        if not is_plain:
            return STRAY
        planned, storage = self._pack_bytes, tensor.untyped_storage()
        num_bytes, was = storage.nbytes(), "nothing was"
        if index < len(planned):
            expected = planned[index]
            if expected in (0, num_bytes) or (self._is_bound and num_bytes < expected):
                if not self._is_bound or self._is_shared(index, storage._cdata):
                    return index
                self.refusal = "a copy was saved where a tensor was to be saved again"
                return LEFT
            was = f"{expected} were"
        self.refusal = f"one of {num_bytes} bytes was saved where {was} expected"
        return LEFT

    def _is_shared(self, index: int, key: int) -> bool:
        """Whether a pack is of the storage that it was planned to share; asked of plans that serve several shapes.

        At some lengths an op copies what it takes as it is at others.
        """
        first = self._program.first_packs[index]
        self._keys[index] = key
        return first == index or self._keys.get(first, key) == key

    @override
    def passed_packs(self, index: int) -> Sequence[int]:
        return (index,)

    @override
    def passed_unpacks(self, index: int, ordinal: int) -> Sequence[int]:
        return (ordinal,)

    @override
    def lacks(self, num_packs: int, *, sees_ops: bool) -> str:
        # Exact sizes tell as they come. Under bounds, a step of another structure of the family lacks op by op a stray.
        if not self._is_bound:
            return ""
        num_first = self._program.num_first_packs
        missing = f"backward began where {num_first} saved tensors were expected" if num_packs < num_first else ""
        return self._lacks_op(sees_ops) or missing


class _ByPlace(Follower):
    """Follows packs whose ordinals are not those of the plan.

    Attributes:
        place: Planned packs that are behind.
    """

    def __init__(self, program: Program, unpacks: Sequence[Sequence[int]], *, most_stray_ops: int) -> None:
        super().__init__(program, most_stray_ops=most_stray_ops)
        self.place = 0
        self._unpacks = unpacks
        self._places: dict[int, int] = {}
        self._next_unpack = 0

    @override
    def passed_unpacks(self, index: int, ordinal: int) -> Sequence[int]:
        ordinals = self._unpacks[self._places[index]] if index in self._places else ()
        found = next((planned for planned in ordinals if planned >= self._next_unpack), -1)
        passed = range(self._next_unpack, found + 1)
        self._next_unpack = max(self._next_unpack, found + 1)
        return passed


class BySize(_ByPlace):
    """Follows a step along a plan that was made elsewhere."""

    def __init__(self, program: Program, route: SizeRoute) -> None:
        super().__init__(program, route.unpacks, most_stray_ops=sys.maxsize)  # what is saved tells
        self._route, self._pack_bytes = route, program.pack_bytes
        self._num_taken = 0

    @override
    def pack(self, index: int, tensor: Tensor, *, is_plain: bool, num_unpacks: int) -> int:
        num_bytes = tensor.untyped_storage().nbytes() if is_plain else 0
        place = self.place_of(index, num_bytes)
        if place == LEFT:
            self.refusal = f"one of {num_bytes} bytes was saved where {self._expected()}"
        return place

    def place_of(self, index: int, num_bytes: int) -> int:
        """The place of a pack.

        Args:
            index: Its ordinal in the step.
            num_bytes: Of the storage behind it.
        """
        place = self._found(num_bytes)
        if place >= 0:
            self.place = place + 1
            self._places[index] = place
            return place
        return STRAY if num_bytes <= TINY_BYTES else LEFT

    def _found(self, num_bytes: int) -> int:
        planned, matters, place = self._pack_bytes, self._route.matters, self.place
        if place < len(planned) and planned[place] in (0, num_bytes):
            return place
        reach = _FEW_MISSING if num_bytes <= TINY_BYTES else _MANY_MISSING
        for ahead in range(place, min(place + reach, len(planned))):
            if planned[ahead] == num_bytes:
                return ahead
            if matters[ahead]:
                break
        return -1

    @override
    def passed_packs(self, index: int) -> Sequence[int]:
        passed = range(self._num_taken, self.place)
        self._num_taken = self.place
        return passed

    @override
    def lacks(self, num_packs: int, *, sees_ops: bool) -> str:
        is_missing = any(self._route.matters[self.place : self._program.num_first_packs])
        return self._lacks_op(sees_ops) or (f"backward began where {self._expected()}" if is_missing else "")

    def _expected(self) -> str:
        if self.place >= len(self._pack_bytes):
            return "nothing more was expected"
        return f"one of {self._pack_bytes[self.place]} bytes was expected"

    @override
    def where(self) -> str:
        module = self._route.modules[self.place] if self.place < len(self._route.modules) else ""
        return f", in `{module}`," if module else ""


class ByForm(_ByPlace):
    """Follows a step along a plan for another structure.

    Layers of a stack look alike, so one that was left out shows where the stack ends, which is as good. What does not
    continue the plan is *unmatched*. The step comes back to its plan where the last few saves look like consecutive
    ones of it further on: three of them, or two that are unique there. Places only move forward, each is taken once.

    A backward between two saves is a border, at which much of what was kept goes: the step is not taken to be beyond
    one that it has not come by, nor before one that it has.

    Attributes:
        end: The next border, or how many packs there are.
        num_unmatched: Packs in a row that the plan does not have.
    """

    follows_ops = False

    def __init__(self, program: Program, route: FormRoute) -> None:
        super().__init__(program, route.unpacks, most_stray_ops=0)
        self.route = route
        self.num_unmatched = 0
        self._num_behind = 0  # unpacks before the last pack
        self._recent: list[SavedForm] = []
        self.end = route.borders[0] if route.borders else len(route.forms)

    @override
    def pack(self, index: int, tensor: Tensor, *, is_plain: bool, num_unpacks: int) -> int:
        is_border, self._num_behind = num_unpacks > self._num_behind, num_unpacks
        place = self.place_of(form_of(tensor, is_plain=is_plain), is_border=is_border)
        if place >= 0:
            self._places[index] = place
        return place

    def place_of(self, form: SavedForm, *, is_border: bool = False) -> int:
        """The place of a pack.

        Args:
            form: What it saves.
            is_border: Whether there was a backward since the pack before it.
        """
        if is_border:
            self._cross(form)
        forms, place = self.route.forms, self.place
        if place < self.end and forms[place].admits(form):
            self._go_on(place)
            return place
        recent = self._recent
        recent.append(form)
        del recent[:-NUM_SURE]
        self.num_unmatched += 1
        found = self._found(NUM_UNIQUE, is_unique=True)
        if found < 0:
            found = self._found(NUM_SURE, is_unique=False)
        if found >= 0:
            self._go_on(found)
        return found

    def _cross(self, form: SavedForm) -> None:
        """Go on behind the plan's next border, or behind one of those after it where that is what comes now."""
        borders, num_packs = self.route.borders, len(self.route.forms)
        first = bisect_left(borders, self.end)
        near = range(first, min(first + _NUM_BORDERS, len(borders)))
        chosen = next((i for i in near if self.route.forms[borders[i]].admits(form)), first)
        self.place = borders[chosen] if chosen < len(borders) else num_packs
        self.end = borders[chosen + 1] if chosen + 1 < len(borders) else num_packs
        self._recent.clear()

    def _go_on(self, place: int) -> None:
        self.place, self.num_unmatched = place + 1, 0
        if self._recent:
            self._recent.clear()

    def _found(self, length: int, *, is_unique: bool) -> int:
        """Where the last few packs are before the next border, by the last of them; -1 for nowhere."""
        recent = self._recent[-length:]
        if len(recent) < length:
            return -1
        return self.route.places.find(recent, self.place, self.end, is_unique=is_unique)

    @override
    def passed_packs(self, index: int) -> Sequence[int]:
        return (self._places[index],) if index in self._places else ()
