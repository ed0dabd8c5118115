"""Dataloaders and batches that are hard on trials: each is followed as the training will have it, or is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_offload.callbacks.tuning.data import Look
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.test_errors import raised
from tests.callbacks.training import (
    NUM_FEATURES,
    NUM_SAMPLES,
    Clock,
    Net,
    assert_same,
    finder_of,
    fitted,
    is_trial,
    samples,
)


class OfSixteen:
    """A batch sampler that tells nobody its size."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start, start + 16)) for start in range(0, NUM_SAMPLES, 16)])

    def __len__(self) -> int:
        return NUM_SAMPLES // 16


class Deaf(Net):
    """Its batches come from a sampler that does not know of the attribute."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), batch_sampler=OfSixteen())  # type: ignore[arg-type]


class Graphs:
    """A batch of a library's own kind, in which nobody finds samples."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self.rows = rows

    def to(self, *args: Any, **kwargs: Any) -> Graphs:
        return self

    def __getitem__(self, index: int) -> list[tuple[Tensor, Tensor]]:
        return self.rows


class Graphical(Net):
    """Its batches cannot be repeated; its loader knows its size, or a batch sampler that tells nobody."""

    is_deaf = False

    def train_dataloader(self) -> DataLoader[Any]:
        if self.is_deaf:
            return DataLoader(samples(), batch_sampler=OfSixteen(), collate_fn=Graphs)  # type: ignore[arg-type]
        return DataLoader(samples(), self.batch_size, shuffle=True, collate_fn=Graphs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = zip(*batch.rows, strict=True)
        return super().training_step([torch.stack(features), torch.stack(labels)], batch_idx)


@pytest.mark.parametrize("objective", ["throughput", "goodput"])
def test_batches_that_cannot_be_repeated(make_trainer: MakeTrainer, objective: str) -> None:
    """They are drawn from loaders of each size; the training is that of the found size, bit for bit."""
    clock = Clock()
    finder = finder_of(clock, objective=objective)
    ours = fitted(make_trainer(callbacks=[finder]), Graphical(clock=clock))
    size, rate = finder.result.batch_size, finder.result.lr
    assert objective != "throughput" or size == 16
    assert_same(ours, fitted(make_trainer(), Graphical(batch_size=size, lr=rate)))


def test_a_loader_of_objects_that_tells_no_size(make_trainer: MakeTrainer) -> None:
    """Nothing shows whether it follows the attribute: what its objects hold does not."""
    net = Graphical(batch_size=16)
    net.is_deaf = True
    message = raised(make_trainer(callbacks=[finder_of(Clock(), max_val=32)]), net)
    assert "was set from 16 to 32, but the batches go on having" in message


class Blocks(Dataset[Any]):
    """Its items are batches."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> Any:
        return samples()[index * self.size : (index + 1) * self.size]

    def __len__(self) -> int:
        return NUM_SAMPLES // self.size


class Blocked(Net):
    """Its data set makes the batches, of the size that the attribute has."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Blocks(self.batch_size), batch_size=None)


class FixedBlocks(Net):
    """Its data set makes the batches, of a size of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Blocks(4), batch_size=None)


@pytest.mark.parametrize(("kind", "size"), [(Deaf, 16), (FixedBlocks, 4)])
def test_a_loader_that_ignores_the_size_is_an_error(make_trainer: MakeTrainer, kind: Any, size: int) -> None:
    """Though it has no attribute that says so: a batch of another size is asked for, and looked at."""
    message = raised(make_trainer(callbacks=[finder_of(Clock())]), kind(batch_size=size, scheduler="step"))
    assert re.search(f"was set from {size} to {2 * size}, but the batches go on having {size} samples", message), (
        message
    )


def test_a_data_set_that_makes_its_batches_is_followed(make_trainer: MakeTrainer) -> None:
    """Its length is that of batches, not of samples."""
    clock = Clock()
    finder = finder_of(clock)
    net = Blocked(clock=clock, scheduler="step")
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert finder.result.batch_size == 16
    assert net.sizes == [16] * (NUM_SAMPLES // 16)


class Pair(Net):
    """Draws from two loaders, the second of which has twice the size; or one that never changes."""

    def __init__(self, second: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.second = second
        self.pairs: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.pairs.append((len(batch["a"][0]), len(batch["b"][0])))
        trials = is_trial(self)
        assert not trials or self.pairs[-1][1] == self.second(self.pairs[-1][0]), self.pairs[-1]
        return super().training_step(batch["a"], batch_idx)

    def train_dataloader(self) -> Any:
        return {"a": DataLoader(samples(), self.batch_size), "b": DataLoader(samples(), self.second(self.batch_size))}


@pytest.mark.parametrize("second", [lambda size: 2 * size, lambda size: 8, lambda size: 4])
def test_each_of_several_loaders_has_its_own_size_in_trials(make_trainer: MakeTrainer, second: Any) -> None:
    """As it will have in the training, be it in proportion, or one that stays, even that of the first."""
    clock = Clock()
    finder = finder_of(clock)
    net = Pair(second, clock=clock, scheduler="step")
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert finder.result.batch_size == 16
    assert net.pairs[0] == (16, second(16))


class Weighted(Net):
    """Its batch has weights of the three classes, as many as there are samples in it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(batch_size=3, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels, weights = batch
        assert weights.shape == (3,)
        return super().training_step([features, labels], batch_idx) * weights.sum()

    def train_dataloader(self) -> DataLoader[Any]:
        def collate(rows: Any) -> list[Tensor]:
            return [torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]), torch.ones(3)]

        return DataLoader(samples(), self.batch_size, collate_fn=collate)


def test_a_tensor_that_only_looks_like_a_batch_is_left_alone(make_trainer: MakeTrainer) -> None:
    """One that is as long at another size is not made of samples."""
    clock = Clock()
    finder = finder_of(clock, max_val=15)
    make_trainer(callbacks=[finder], max_epochs=1).fit(Weighted(clock=clock, scheduler="step"))
    assert finder.result.batch_size == 15


TRIED: set[int] = set()
"""Lengths that trials had: what a model notes of them itself is put back."""


class Lengths(Net):
    """Sequences as long as the longest in their batch; the longest of all is not in the first one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, features, labels = batch
        if is_trial(self):
            TRIED.add(tokens.shape[1])
        return super().training_step([features, labels], batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        lengths = [3 + (index % 7) for index in range(NUM_SAMPLES)]
        lengths[50] = 40
        rows = [(torch.ones(length), *samples()[index]) for index, length in enumerate(lengths)]

        def collate(batch: Any) -> list[Tensor]:
            tokens = torch.nn.utils.rnn.pad_sequence([row[0] for row in batch], batch_first=True)
            return [tokens, torch.stack([row[1] for row in batch]), torch.stack([row[2] for row in batch])]

        return DataLoader(rows, self.batch_size, collate_fn=collate)  # type: ignore[arg-type]


def test_where_lengths_vary_the_longest_batch_is_tried(make_trainer: MakeTrainer) -> None:
    """Not the first one, which would leave too little memory for the others; the result says so."""
    clock = Clock()
    finder = finder_of(clock)
    TRIED.clear()
    make_trainer(callbacks=[finder], max_epochs=1).fit(Lengths(clock=clock, scheduler="step"))
    assert {40} == TRIED
    assert "Lengths vary: trials have the longest of 24 batches" in finder.result.note


def test_batches_of_varied_lengths_are_as_long_as_the_mean_of_their_size(make_trainer: MakeTrainer) -> None:
    """What is expected of a size is that of the mean step, padding included, and not that of the longest."""
    clock = Clock()
    finder = finder_of(clock)
    net = Lengths(clock=clock, scheduler="step")
    read = [batch[0].shape[1] for batch in net.train_dataloader()]
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    # beside its tokens a sample has its features and its label
    look, _ = Look.at([torch.zeros(4, length + NUM_FEATURES + 1) for length in read])
    assert finder.result.batch_size == 16
    in_trials = 4.0  # a step takes as long at any size
    assert finder.result.expected_speedup == pytest.approx(in_trials * look.mean_length() / look.mean_length(4))
    assert f"by which a mean one with 4 is {look.mean_length():.2f} as long" in finder.result.note
