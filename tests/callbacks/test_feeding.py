"""What the fit loop is fed in trials: the run's own batches, without an end, the largest where they differ."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_offload.callbacks.tuning.batches import num_samples
from lightning_offload.callbacks.tuning.data import Feed, Look
from lightning_offload.errors import TuningError
from lightning_offload.tuning.shapes import shapes_in


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class MadeOfRows:
    rows: dataclasses.InitVar[list[Any]]
    x: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)

    def __post_init__(self, rows: list[Any]) -> None:
        self.x = torch.stack(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


def test_shapes_of_every_kind_of_nesting() -> None:
    """Named tuples, records that are made of more than their fields, slots, arrays, and objects that hold tensors."""
    x = torch.zeros(2, 3)
    store = SimpleNamespace(mapping={"x": x, "edges": torch.zeros(2, 7)})
    batch = [
        Pair(x, [x, {"a": x}]), MadeOfRows([torch.ones(3)]), Slotted(x), np.zeros((2, 4)), ["p", 1], store, len, Pair,
    ]  # fmt: skip
    assert list(shapes_in(batch)) == [(2, 3), (2, 3), (2, 3), (1, 3), (2, 3), (2, 4), (2, 3), (2, 7)]
    loop = SimpleNamespace(x=x)
    loop.itself = loop
    assert set(shapes_in(loop)) == {(2, 3)}, "it comes to an end"


class _Batches:
    """An iterable that is no collection, of which each part would be a loader."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


def feed(batches: Iterable[Any], **kwargs: Any) -> Feed:
    fetcher = _PrefetchDataFetcher()
    fetcher.setup(CombinedLoader(_Batches(batches), "max_size_cycle"))
    iter(fetcher)
    return Feed(fetcher, **kwargs)


def taken(found: Feed, number: int) -> list[Any]:
    return [batch for batch, _, _ in itertools.islice(found, number)]


@pytest.mark.parametrize("most", [256, 0])
@pytest.mark.parametrize("is_sized", [True, False])
def test_epochs_follow_one_another_without_their_short_ends(is_sized: bool, most: int) -> None:
    """The last batch of ten samples by four has two; a loader that is empty is an error."""

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(10))

    data: Any = list(range(10)) if is_sized else Stream()
    found = [batch.tolist() for batch in taken(feed(DataLoader(data, 4), most=most), 5)]
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7]]
    expected = [*epoch, *epoch, epoch[0]]
    assert found == (expected if not most else [*expected[:1], *expected[:4]]), "what was looked at comes once"
    with pytest.raises(TuningError, match="the train dataloader is empty"):
        next(feed(DataLoader([], 4), most=most))  # type: ignore[arg-type]


def test_an_epoch_of_one_short_batch_is_all_there_is() -> None:
    """It is fed again and again."""
    assert [len(batch) for batch in taken(feed(DataLoader(range(3), 4)), 3)] == [3, 3, 3]  # type: ignore[arg-type]


def test_the_largest_is_fed_where_batches_differ() -> None:
    """Unless all are to be fed as they come; lengths are told from numbers of rows."""
    lengths = [5, 7, 9, 3, 8, 9]
    padded = [torch.zeros(4, length) for length in lengths]
    found = feed(padded)
    assert {tuple(batch.shape) for batch in taken(found, 9)} == {(4, 9)}
    assert found.look is not None
    assert (found.look.is_varied, found.look.is_padded) == (True, True)
    assert found.look.elements == tuple(4 * length for length in lengths)
    packed = feed([SimpleNamespace(nodes=torch.zeros(length, 2)) for length in lengths])
    assert {len(batch.nodes) for batch in taken(packed, 9)} == {9}
    assert packed.look is not None
    assert (packed.look.is_varied, packed.look.is_padded) == (True, False)
    assert [batch.shape[1] for batch in taken(feed(padded, most=0), 8)] == [*lengths, *lengths[:2]]


def test_few_batches_are_read_and_many_where_they_differ() -> None:
    """Eight are enough where all are alike; where they are not, no more than are asked for."""
    alike, _ = Look.at(torch.zeros(4, 3) for _ in range(100))
    assert (len(alike.elements), alike.is_varied) == (8, False)
    varied, largest = Look.at(torch.zeros(4, 1 + number % 90) for number in range(100))
    assert (len(varied.elements), varied.is_varied, largest.shape) == (100, True, (4, 90))
    assert len(Look.at((torch.zeros(4, 1 + number) for number in range(100)), 20)[0].elements) == 20
    late, largest = Look.at(torch.zeros(4, length) for length in [6] * 7 + [2] * 7)
    assert (largest.shape, len(late.elements)) == ((4, 6), 14)


def lengths(*numbers: int) -> Look:
    return Look.at(torch.zeros(4, number) for number in numbers)[0]


def test_a_mean_batch_is_as_long_as_the_mean_of_what_was_read() -> None:
    """By the longest; where batches are alike, or it is not lengths that differ, there is no other."""
    assert lengths(30, 60, 15).mean_length() == pytest.approx(35 / 60)
    assert lengths(7, 7).mean_length(4) == 1.0
    graphs, _ = Look.at([torch.zeros(9, 2), torch.zeros(3, 2)])
    assert graphs.mean_length() == 1.0


def test_larger_batches_are_padded_to_the_longest_of_more_samples() -> None:
    """Twice the size is the longer one of two; half the size is shorter."""
    shares = [lengths(10, 40).mean_length(times) for times in (0.5, 1, 2, 8)]
    assert shares == pytest.approx([1 - 0.75 * 0.5**times for times in (0.5, 1, 2, 8)])
    assert shares == sorted(shares)


def test_what_knows_no_length() -> None:
    """There is no number of samples then."""

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    assert num_samples([DataLoader(Stream())]) is None
    assert num_samples([DataLoader(range(7))]) == 7  # type: ignore[arg-type]
    loaders: Any = [DataLoader(range(n)) for n in (7, 20)]  # type: ignore[arg-type]
    assert (num_samples(loaders), num_samples(loaders, of_shortest=True)) == (20, 7)
