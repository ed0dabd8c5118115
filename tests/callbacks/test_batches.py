"""A batch of any size from one real batch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_offload.callbacks.tuning.batches import batch_size_of, num_samples
from lightning_offload.callbacks.tuning.example import Example
from lightning_offload.errors import TuningError
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import Clock, Net, finder_of


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    name: str = "n"


@dataclasses.dataclass
class MadeOfRows:
    rows: dataclasses.InitVar[list[Any]]
    x: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)

    def __post_init__(self, rows: list[Any]) -> None:
        self.x = torch.stack(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    rows: dataclasses.InitVar[list[Any]]
    x: Any = None

    def __post_init__(self, rows: list[Any]) -> None:
        object.__setattr__(self, "x", torch.stack(rows))


@dataclasses.dataclass
class Counted:
    x: Any
    scale: dataclasses.InitVar[int] = 1
    num: int = dataclasses.field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.num = scale * len(self.x)


def test_samples_are_repeated_in_order_along_the_first_dimension() -> None:
    """Larger and smaller batches; leaves without samples, such as a shared mask, stay as they are."""
    x, shared = torch.arange(6).reshape(3, 2), torch.ones(5)
    batch = {"x": x, "shared": shared, "flag": True, "scalar": torch.tensor(1.0)}
    large = Example(batch=batch, size=3).sized(7)
    assert large["x"].tolist() == x[[0, 1, 2, 0, 1, 2, 0]].tolist()
    assert large["shared"] is shared
    assert large["scalar"].item() == 1.0
    assert Example(batch=batch, size=3).sized(2)["x"].tolist() == x[:2].tolist()
    assert x.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_every_kind_of_nesting() -> None:
    """Types are kept: named tuples, dataclasses, lists of texts, arrays."""
    x = torch.zeros(2, 3)
    made = Example(batch=[Pair(x, [x, {"a": x}]), Record(x), ["p", "q"], np.zeros((2, 4)), (x,)], size=2).sized(5)
    pair, record, texts, array, single = made
    assert type(pair) is Pair
    assert [pair.x.shape, pair.y[0].shape, pair.y[1]["a"].shape] == [(5, 3)] * 3
    assert (type(record), record.x.shape, record.name) == (Record, (5, 3), "n")
    assert texts == ["p", "q", "p", "q", "p"]
    assert array.shape == (5, 4)
    assert single[0].shape == (5, 3)


@pytest.mark.parametrize("kind", [MadeOfRows, Frozen])
def test_records_that_are_made_of_more_than_their_fields(kind: Any) -> None:
    """Their fields follow the size; what they were made of is gone, and nobody asks for it."""
    batch = kind([torch.ones(3), torch.zeros(3)])
    made = Example(batch=batch, size=2, other=kind([torch.ones(3)]), other_size=1).sized(5)
    assert type(made) is kind
    assert made.x.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert batch.x.shape == (2, 3)
    assert batch_size_of(batch, None) == 2


def test_records_that_count_their_samples() -> None:
    """What a record works out of its fields follows these."""
    assert Example(batch=Counted(torch.ones(2, 3)), size=2).sized(5).num == 5


def test_a_batch_that_cannot_be_repeated_is_an_error() -> None:
    """The message names make_batch."""
    with pytest.raises(TuningError, match="make_batch="):
        Example(batch=[torch.zeros(3), "x"], size=2).sized(4)
    with pytest.raises(TuningError, match="make_batch="):
        batch_size_of(["x", 1], 4)


@pytest.mark.parametrize(("expected", "found"), [(2, 2), (5, 5), (4, 5)])
def test_the_size_of_a_batch_is_the_expected_one_if_a_tensor_has_it(expected: int, found: int) -> None:
    """Otherwise that of the first tensor: the data may have fewer samples than were asked for."""
    assert batch_size_of({"a": torch.zeros(5, 2), "b": torch.zeros(2)}, expected) == found


def test_what_knows_no_length() -> None:
    """There is no number of samples then."""

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    assert num_samples([torch.utils.data.DataLoader(Stream())]) is None
    assert num_samples([torch.utils.data.DataLoader(range(7))]) == 7  # type: ignore[arg-type]


def test_batches_of_the_users_own(make_trainer: MakeTrainer) -> None:
    """`make_batch` is asked for every size that is tried, and no loader is drawn from."""
    asked: list[int] = []

    def make_batch(batch_size: int) -> list[torch.Tensor]:
        asked.append(batch_size)
        return [torch.zeros(batch_size, 6), torch.zeros(batch_size, dtype=torch.long)]

    clock = Clock()
    finder = finder_of(clock, make_batch=make_batch)
    make_trainer(callbacks=[finder], max_epochs=1).fit(Net(clock=clock))
    assert finder.result.batch_size == 16
    assert {trial.batch_size for trial in finder.result.trials} <= set(asked)
