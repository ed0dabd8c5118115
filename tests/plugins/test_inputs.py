"""Batches that torch's pytree does not know have shapes as others have."""

from __future__ import annotations

import dataclasses
import random
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.devices import find_device
from lightning_offload.plugins.inputs import flatten
from lightning_offload.plugins.shape_families import shape_of
from tests.plugins.training import net


@dataclasses.dataclass
class Sample:
    """A data class."""

    x: Tensor
    length: int


class Store:
    """As PyG keeps a batch's tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        self._mapping = tensors

    def to(self, device: str) -> Store:
        """Move it."""
        return self


class Graphs(Store):
    """As PyG's batches are."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        self._store = Store(**tensors)


KINDS = {
    "mapping": lambda x: UserDict(x=x),
    "data class": lambda x: Sample(x, 3),
    "graphs": lambda x: Graphs(x=x, edges=x.detach()[:1]),
    "in a list": lambda x: [UserDict(x=UserDict(x=x))],
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_sizes_are_those_of_the_tensors_within(kind: str) -> None:
    """One family whatever they are, and another signature with each."""
    small, large = (shape_of((KINDS[kind](torch.zeros(n, 4)),)) for n in (2, 3))
    assert small.family == large.family
    assert small.signature != large.signature
    assert (2, 4) in small.shapes
    assert (3, 4) in large.shapes
    assert small == shape_of((KINDS[kind](torch.zeros(2, 4)),))
    assert find_device(None, KINDS[kind](torch.zeros(2, 4, device="meta"))).type == "meta"


def test_what_is_no_batch_stays_closed() -> None:
    """Numbers count by type, and objects that nobody moves by theirs; a module is the program's."""
    for other in (SimpleNamespace(x=torch.zeros(2)), torch.nn.Linear(2, 2), 3, "text", None, torch.float32, Sample):
        assert flatten((other,)) == ([other], str(torch.utils._pytree.tree_flatten((other,))[1]))


def test_what_holds_itself_ends() -> None:
    """As deep as it goes, and no deeper."""
    batch: UserDict[str, Any] = UserDict(x=torch.zeros(2))
    batch["batch"] = batch
    leaves, _ = flatten(batch)
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == 4


def test_lengths_are_planned_as_those_of_a_dict() -> None:
    """The same figures: shapes, steps at first sight, steps that left their plan."""

    def train(kind: Any) -> tuple[object, ...]:
        rng, model = random.Random(0), net()
        with MemoryPlugin("64MiB", policy="all-swap", module=model) as memory:
            for _ in range(30):
                batch = kind(x=torch.randn(8 * rng.randint(2, 8), 256))
                with memory.step(batch):
                    model(batch["x"]).square().mean().backward()
                model.zero_grad()
            report = memory.report()
        return report.num_shapes, report.num_at_first_sight, report.num_deviations, report.num_aligned

    assert train(UserDict) == train(dict)
    assert train(dict)[0] > 3
