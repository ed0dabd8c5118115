"""Specializations of a step that differ in nothing but sizes: what a few of them showed, the others are planned by.

A batch that is padded to its longest sample has a new shape in nearly every step. From three recorded shapes of one
structure a model of the step at any sizes is fitted (:mod:`~lightning_offload.planning.step_model`), and from then on a
shape that was never seen is planned before its first op, in milliseconds. Lengths are rounded up to an eighth of the
power of two below them, so that one plan serves several shapes: a plan serves each step with the same ops whose tensors
are no larger than planned.

What replays gave is known by the structure: a storage that was verified at one size need not be at another, and one
that came out otherwise is recomputed at none. So is by how much measured peaks exceeded what was predicted.

A prediction is trusted within what was recorded, and for a quarter beyond it where all bytes follow laws and no step
was seen that did not: a shape that is larger in any way is recorded itself, and so is one whose steps left their plan
twice, or were measured above the budget. Steps that follow their plans make up for one that did not. Where bytes
follow no law, a shape is planned for as the next larger recorded one.

Shortfalls: the model is of the structure that most of the recorded shapes have. Ops that run at some lengths only, and
save nothing, are seen in measured steps alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_offload.accelerators import KINDS
from lightning_offload.errors import OffloadError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.family import FamilyPlanner
from lightning_offload.planning.scaling_laws import Point
from lightning_offload.planning.step_model import StepModel, structure_of
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.inputs import flatten
from lightning_offload.plugins.plain_steps import PlainNeed
from lightning_offload.plugins.planned_baseline import Dropping, OldGradients
from lightning_offload.plugins.sampling_schedule import HookElision
from lightning_offload.plugins.structure_changes import StructureChanges

Sizes = tuple[int, ...]
"""Of all tensors that a step is given, one after another."""

MIN_SAMPLES = 3
"""Recorded shapes of one structure that a model needs: two do not tell a line from a parabola."""

_MANY_SAMPLES = 5  # of which three are not alike: structures change
_MAX_SAMPLES = 8  # recorded shapes that laws are fitted to; more have changed no law
_MAX_VARYING = 4  # numbers: more than that are no lengths
_MAX_DEVIATIONS = 2  # of steps of one shape, before it is recorded
_MAX_REMEMBERED = 1024  # shapes of which one did
_GRAIN = 8  # buckets between one power of two and the next
_COARSE_GRAIN = 2  # where a plan of their own does not pay yet
_BEYOND = 1.25  # times the largest recorded size, where laws held so far


class StepShape(NamedTuple):
    """What a specialization is known by.

    Attributes:
        signature: Of the shapes and types of its inputs, and of autocast.
        family: The same without sizes.
        shapes: The shapes of the tensors among its inputs.
        sizes: All numbers that may vary in these, one after another; of slices the strides, too.
    """

    signature: str
    family: str
    shapes: tuple[Sizes, ...]
    sizes: Sizes


def shape_of(inputs: Any) -> StepShape:
    """What a step with these inputs is known by.

    Numbers, strings and other leaves count by type, not by value: a batch index differs in every step.

    Args:
        inputs: Any pytree of tensors and other objects.
    """
    return shape_of_leaves(*flatten(inputs))


def shape_of_leaves(leaves: Sequence[Any], spec: object) -> StepShape:
    """The same of inputs that are flattened already.

    Args:
        leaves: Their leaves.
        spec: How these are nested.
    """
    rows = [_describe(leaf) for leaf in leaves]
    modes = [(kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind)]
    family = short(f"{spec} {[row.alike for row in rows]} {modes}")
    signature = short(repr((family, *[(row.shape, row.strides) for row in rows])))
    sizes = tuple(itertools.chain.from_iterable(row.sizes for row in rows))
    return StepShape(signature, family, tuple([row.shape for row in rows if row.sizes]), sizes)


def short(text: str) -> str:
    """A key for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Described(NamedTuple):
    """A leaf: what it has in common with others of other sizes, its shape and strides, and what of these are sizes."""

    alike: object
    shape: Sizes = ()
    strides: Sizes = ()
    sizes: Sizes = ()


def _describe(leaf: Any) -> _Described:
    if not isinstance(leaf, Tensor):
        return _Described(type(leaf).__name__)
    device = leaf.device.type
    if leaf.is_nested:
        return _Described((leaf.dtype, "nested", device))
    if leaf.layout is not torch.strided:
        return _Described((leaf.dtype, leaf.layout, tuple(leaf.shape), device))
    shape, strides = tuple(leaf.shape), leaf.stride()
    layout, sizes = "contiguous", shape
    if not leaf.is_contiguous():
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
        if last is not None and leaf.is_contiguous(memory_format=last):
            layout = "channels last"
        else:  # a slice: how far apart its rows lie is one more size
            layout = f"{sorted(range(len(shape)), key=lambda i: (strides[i], i))} apart"
            sizes = (*shape, *strides)
    return _Described((leaf.dtype, len(shape), layout, device, leaf.requires_grad), shape, strides, sizes)


class Extrapolated(NamedTuple):
    """A step at sizes that were not recorded.

    Attributes:
        key: Of the specialization.
        point: What varies, at the sizes that it is planned for.
        actual: The same at the sizes that were asked for.
        is_coarse: Whether it is planned for many sizes, since a plan of its own does not pay yet.
    """

    key: str
    point: Point
    actual: Point
    is_coarse: bool = False


class Sample(NamedTuple):
    """A recorded step that a family is known by.

    Attributes:
        sizes: Of what it is given.
        graph: The step.
        gradient_bytes: Gradients of earlier steps that are among its storages.
        structure: What is the same in steps of other sizes.
    """

    sizes: Sizes
    graph: StepGraph
    gradient_bytes: int
    structure: str


class ShapeFamily:
    """Specializations of a step that differ in nothing but sizes.

    Attributes:
        name: What their shapes have in common.
        verified: Storages whose replays were verified at some size.
        mismatched: Storages that are recomputed at none.
        shortfall_bytes: By how much measured peaks exceeded predicted ones.
        gradients: Gradients of earlier steps, which one step of several has.
        baseline_bytes: What is on the device beside its steps; None before that was counted.
        dropping: What steps drop of that.
        version: Grows with what extrapolated plans depend on.
        changes: How their structure changes.
        hooks: Which of them that keep everything go without hooks: they make as many autograd nodes each.
        samples: The recorded steps that it is known by, by the signatures of their specializations.
        alike: Signatures of those whose structure the model has: storages are known by their indices in that.
        hasty_seconds: What a plan made in haste takes, the shortest time of any; None before there was one.
        step_seconds: What the last one so planned was to take.
        lost_seconds: By bucket without a plan: what steps have lost under the plan for a larger one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.verified: set[int] = set()
        self.mismatched: set[int] = set()
        self.shortfall_bytes = 0
        self.gradients = OldGradients()
        self.baseline_bytes: int | None = None
        self.dropping = Dropping()
        self.version = 0
        self.changes = StructureChanges(spans_sizes=True)
        self.hooks = HookElision()
        self._most_elements: tuple[int, ...] = ()
        self.samples: dict[str, Sample] = {}
        self.alike: frozenset[str] = frozenset()
        self.hasty_seconds: float | None = None
        self.step_seconds = 0.0
        self.lost_seconds: dict[str, float] = {}
        self._too_large: dict[str, tuple[int, int]] = {}
        self._structure = ""
        self._largest: Point = ()
        self._planner: FamilyPlanner | None = None
        self._varying: _Varying | None = None
        self._is_fitted = True
        self._deviations: dict[str, int] = {}
        self._measured_of = 0

    @property
    def plain(self) -> PlainNeed:
        """What its steps need where they keep everything."""
        return self.changes.plain

    @property
    def gradient_bytes(self) -> int:
        """Gradients of earlier steps that are among the storages of the model's step."""
        return max((self.samples[signature].gradient_bytes for signature in self.alike), default=0)

    def learn(self, signature: str, sizes: Sizes, graph: StepGraph, gradient_bytes: int = 0) -> None:
        """Take a recorded step over.

        Args:
            signature: Of its kind.
            sizes: Of what it is given.
            graph: The step.
            gradient_bytes: Gradients of earlier steps that are among its storages.
        """
        self._deviations.pop(signature, None)
        if any(len(sample.sizes) != len(sizes) for sample in self.samples.values()):
            self.samples.clear()  # they came from elsewhere
        if signature not in self.samples and len(self.samples) >= _MAX_SAMPLES:
            del self.samples[self._least_useful()]
        self.samples[signature] = Sample(sizes, graph, gradient_bytes, structure_of(graph))
        self._is_fitted = False

    def learn_plain(self, shapes: tuple[Sizes, ...], need: PlainNeed) -> None:
        """Know what a recorded step would have needed, had it kept everything.

        Args:
            shapes: Of what it was given.
            need: That.
        """
        if need.most_bytes is None:
            return
        self.plain.learn(need.most_bytes, need.there_bytes)
        elements = tuple(map(math.prod, shapes))
        known = self._most_elements if len(self._most_elements) == len(elements) else elements
        self._most_elements = tuple(map(max, zip(elements, known, strict=True)))

    def has_ample_room_for(self, shape: StepShape, hardware: Hardware) -> bool:
        """Whether a step of a shape that was not recorded may keep everything, the budget being what it is."""
        elements = tuple(map(math.prod, shape.shapes))
        if hardware.budget_bytes is None or len(elements) != len(self._most_elements):
            return False
        size = max((n / max(1, most) for n, most in zip(elements, self._most_elements, strict=True)), default=1.0)
        return self.plain.fits_amply(hardware.device, hardware.budget_bytes, size)

    def _least_useful(self) -> str:
        """The sample that was taken first, of those that are not the only ones as large as they are."""
        largest = [max(column) for column in zip(*(sample.sizes for sample in self.samples.values()), strict=True)]

        def num_alone(signature: str) -> int:
            others = [sample.sizes for other, sample in self.samples.items() if other != signature]
            columns = zip(*others, strict=True)
            return sum(most not in column for most, column in zip(largest, columns, strict=True))

        return min(self.samples, key=lambda signature: num_alone(signature) > 0)

    def forget(self, signature: str) -> None:
        """Drop a recorded step."""
        if self.samples.pop(signature, None) is not None:
            self._is_fitted = False

    def take_over(self, signature: str, verified: set[int], mismatched: set[int], shortfall_bytes: int) -> None:
        """Learn what planned steps of a recorded specialization showed, where the model has its structure."""
        sample = self.samples.get(signature)
        if self._is_fitted and sample is not None and sample.structure == self._structure:
            self.verified.update(verified)
            self.mismatched.update(mismatched)
            self.shortfall_bytes = max(self.shortfall_bytes, shortfall_bytes)

    @property
    def varies(self) -> bool:
        """Whether too many of the recorded steps differ in structure for a model of one of them."""
        if len(self.samples) < _MANY_SAMPLES:
            return False
        self._fit()
        return self._planner is None

    def predicts(self, signature: str) -> bool:
        """Whether a recorded step has the structure that the model has."""
        self._fit()
        return signature in self.alike

    def has_as_large(self, sizes: Sizes) -> bool:
        """Whether each of some sizes was recorded, or a larger one; or one that is hardly smaller."""
        known = [sample.sizes for sample in self.samples.values()]
        columns = zip(sizes, *known, strict=True)
        return all(n <= _rounded_up(max(column)) for n, *column in columns) if known else False

    def find(
        self, sizes: Sizes, *, signature: str = "", is_exact: bool = False, is_coarse: bool = False
    ) -> Extrapolated | None:
        """How a step at sizes that were not recorded is planned; None where nothing predicts it.

        Nothing does far beyond the largest that were recorded, nor where steps of that shape were not as predicted.

        Args:
            sizes: Its sizes.
            signature: What it would be known by, were it recorded.
            is_exact: Whether for these sizes alone.
            is_coarse: Whether for many others, too.
        """
        if len(self.samples) < MIN_SAMPLES or self._deviations.get(signature, 0) >= _MAX_DEVIATIONS:
            return None
        self._fit()
        point = self._varying.point(sizes) if self._varying is not None else None
        if point is None or any(n > self._farthest(most) for n, most in zip(point, self._largest, strict=True)):
            return None  # there the model would guess
        grain = _COARSE_GRAIN if is_coarse else _GRAIN
        bucket = point if is_exact else tuple([_rounded_up(n, grain) for n in point])
        if is_coarse and any(n > self._farthest(most) for n, most in zip(bucket, self._largest, strict=True)):
            return None
        model = self.planner.model
        if model.num_inexact:  # between what was recorded, too: what was larger is all that is sure
            larger = [p for p in model.sizes if isinstance(p, tuple) and all(map(operator.ge, p, point))]
            if not larger:
                return None
            bucket = min(larger, key=math.prod)
        return Extrapolated(short(f"{self.name} {self._varying} {bucket}"), bucket, point, is_coarse)

    def _farthest(self, most: int) -> int:
        """Up to what a size is predicted of which this is the largest that was recorded."""
        is_lawful = not (self.planner.model.num_inexact or self.changes.num_deviations)
        return _rounded_up(int(_BEYOND * most) if is_lawful else most)

    @property
    def planner(self) -> FamilyPlanner:
        """What plans its steps, once :meth:`find` has found how."""
        assert self._planner is not None
        return self._planner

    def note_hasty(self, seconds: float, plan: MemoryPlan | None) -> None:
        """Note what a plan made in haste took, where something was to search, and what its step is to take."""
        if plan is not None and plan.decisions:
            self.hasty_seconds = min(seconds, self.hasty_seconds or seconds)
            self.step_seconds = plan.predicted_step_seconds

    def note_loss(self, key: str, seconds: float) -> None:
        """Note what a step lost under the plan for a larger bucket than its own."""
        if len(self.lost_seconds) >= _MAX_REMEMBERED:
            self.lost_seconds.clear()
        self.lost_seconds[key] = self.lost_seconds.get(key, 0.0) + seconds

    @property
    def _models(self) -> tuple[int, int]:
        """What steps of other sizes are planned by: grows with what is known."""
        return self.version, self.changes.variants.version

    def note_too_large(self, key: str) -> None:
        """No plan for these sizes is within the budget, as long as they are planned by the same."""
        self._too_large[key] = self._models

    def is_too_large(self, key: str) -> bool:
        """Whether there is none: smaller ones are planned by themselves."""
        return self._too_large.get(key) == self._models

    def step_left_its_plan(self, signature: str) -> None:
        """Note that a step of this shape did: where they do again, they are recorded."""
        self._note_wrong(signature, 1)

    def step_was_over(self, signature: str) -> None:
        """Note that a step of this shape was measured above the budget: the next one is recorded."""
        self._note_wrong(signature, _MAX_DEVIATIONS)

    def _note_wrong(self, signature: str, num_times: int) -> None:
        self._deviations[signature] = self._deviations.pop(signature, 0) + num_times
        if len(self._deviations) > _MAX_REMEMBERED:
            del self._deviations[next(iter(self._deviations))]

    def is_sure_of(self, point: Point) -> bool:
        """Whether a prediction is no guess: none was seen to be off, and the point is hardly beyond the rest."""
        is_known = all(n <= most for n, most in zip(point, self._largest, strict=True))
        return is_known and not self.shortfall_bytes and not self.planner.model.num_inexact

    def _fit(self) -> None:
        if self._is_fitted:
            return
        self._is_fitted, self._planner, self._varying, self.alike = True, None, None, frozenset()
        self.version += 1
        self.lost_seconds.clear()
        found = _modelled({sample.sizes: sample.graph for sample in self.samples.values()})
        if found is None:
            return
        self._varying, model = found
        self._planner = FamilyPlanner(model)
        known = [size for size in model.sizes if isinstance(size, tuple)]
        self._largest = tuple(map(max, zip(*known, strict=True)))
        structure = structure_of(model.structure)
        self.alike = frozenset(s for s, sample in self.samples.items() if sample.structure == structure)
        bytes_of_model = hash(tuple(sorted((name, _bytes_in(self.samples[name].graph)) for name in self.alike)))
        if bytes_of_model != self._measured_of:  # what was measured is of another model
            self._measured_of, self.shortfall_bytes = bytes_of_model, 0
            self.changes.sampling_schedule.begin_anew()
        if structure != self._structure:  # what was known of another one is known of other storages
            self._structure, self.verified, self.mismatched = structure, set(), set()


def _modelled(by_sizes: dict[Sizes, StepGraph]) -> tuple[_Varying, StepModel] | None:
    """What varies in steps that are alike, and a model of these; None where too few are.

    What is left out may differ in more than those that are alike, which are looked at again by themselves then.

    Args:
        by_sizes: The recorded steps, by their sizes.
    """
    found: tuple[_Varying, StepModel] | None = None
    while len(by_sizes) >= MIN_SAMPLES:
        varying = _Varying.of(list(by_sizes))
        if varying is None or (found is not None and varying == found[0]):
            return found if varying is not None else None
        points = {sizes: point for sizes in by_sizes if (point := varying.point(sizes)) is not None}
        try:
            model = StepModel.fit({point: by_sizes[sizes] for sizes, point in points.items()})
        except OffloadError:  # no two are alike
            return None
        found, alike = (varying, model), set(model.sizes)
        by_sizes = {sizes: by_sizes[sizes] for sizes, point in points.items() if point in alike}
    return None


def _bytes_in(graph: StepGraph) -> int:
    """A fingerprint of what a step takes: its storages, and what ops allocate within."""
    sizes = tuple(storage.num_bytes for storage in graph.storages)
    return hash((sizes, tuple(op.workspace_bytes for op in graph.ops)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Varying:
    """Which sizes vary: each group of them that are the same in all shapes is one number.

    Attributes:
        groups: Positions, by number.
        constant: The other sizes, by position.
    """

    groups: tuple[tuple[int, ...], ...]
    constant: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shapes: Sequence[Sizes]) -> _Varying | None:
        """Find them; None where nothing varies, or too much."""
        groups: dict[Sizes, list[int]] = {}
        for position, column in enumerate(zip(*shapes, strict=True)):
            groups.setdefault(column, []).append(position)
        constant = [(p, column[0]) for column, places in groups.items() if len(set(column)) == 1 for p in places]
        varying = [tuple(places) for column, places in groups.items() if len(set(column)) > 1]
        if not 1 <= len(varying) <= _MAX_VARYING:
            return None
        return cls(tuple(varying), tuple(constant))

    def point(self, sizes: Sizes) -> Point | None:
        """The numbers that vary, of some sizes; None where others vary there."""
        if any(sizes[position] != size for position, size in self.constant):
            return None
        found = [{sizes[position] for position in group} for group in self.groups]
        if any(len(group) != 1 for group in found):
            return None
        point = tuple(group.pop() for group in found)
        return point if min(point) > 1 else None  # at 1 libraries leave copies out


def _rounded_up(size: int, num_corners: int = _GRAIN) -> int:
    """A size, rounded up so that few plans serve all: to an eighth of the power of two below it, by default."""
    grain = max(1, (1 << (size.bit_length() - 1)) // num_corners)
    return -(-size // grain) * grain
