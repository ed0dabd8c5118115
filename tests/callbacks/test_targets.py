"""Where the batch size may be kept, and that a tuned run sets it there and logs it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_offload.callbacks.tuning.batches import resized
from lightning_offload.callbacks.tuning.targets import find_attribute
from lightning_offload.errors import TuningError
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import Clock, Net, finder_of, fitted, samples


class Data(pl.LightningDataModule):
    """Keeps the batch size itself."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), self.batch_size)


class Bare(Net):
    """Keeps it nowhere but where a test puts it."""

    def __init__(self, size: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        del self.batch_size
        self._hparams.clear()
        self._hparams_initial.clear()
        self._size = size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), self._size())


def test_an_attribute_of_the_datamodule(make_trainer: MakeTrainer) -> None:
    """It is set in the datamodule and in the hparams of both that have it, and these are logged."""
    clock = Clock()
    finder = finder_of(clock)
    data, net = Data(), Net(clock=clock)
    state = fitted(make_trainer(callbacks=[finder], max_epochs=1), net, datamodule=data)
    assert set(net.sizes) == {16}
    assert (data.batch_size, data.hparams.batch_size, net.batch_size, net.hparams.batch_size) == (16,) * 4
    assert state["hparams"] == [{"batch_size": 16, "lr": finder.result.lr}]


@pytest.mark.parametrize("name", ["hparams.batch_size", "batch_size", "hparams.data.batch_size", "data.batch_size"])
@pytest.mark.parametrize("kind", [dict, Namespace])
def test_an_entry_of_the_hparams(make_trainer: MakeTrainer, name: str, kind: Any) -> None:
    """Dotted names lead into nested dicts and namespaces; a plain name is found inside of them."""
    clock = Clock()
    is_nested = "data" in name
    nested = kind(batch_size=4)
    net = Bare(lambda: vars(nested)["batch_size"] if kind is Namespace else nested["batch_size"], clock=clock)
    if is_nested or kind is Namespace:
        net._hparams["data"] = nested
        name = name if is_nested else "data.batch_size"
    else:
        net._hparams["batch_size"] = 4
        net._size = lambda: net._hparams["batch_size"]
    finder = finder_of(clock, batch_arg_name=name)
    fitted_sizes(make_trainer, finder, net)


class Keywords(pl.LightningDataModule):
    """Keeps the batch size among keywords for its loaders, as scvi-tools and PyG do."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.loader_kwargs = {"shuffle": True, **kwargs}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), **self.loader_kwargs)


class Written(pl.LightningDataModule):
    """Has the batch size in its code, and draws what it shuffles by at each call."""

    size = 4

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(int(torch.randint(0, 1 << 20, ())))
        return DataLoader(samples(), self.size, shuffle=True, generator=generator)


class Nowhere(Bare):
    """Keeps neither a batch size nor a learning rate."""

    def __init__(self, rate: float = 0.01, **kwargs: Any) -> None:
        super().__init__(None, **kwargs)
        self.rate = rate
        del self.lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


def test_keywords_of_loaders(make_trainer: MakeTrainer) -> None:
    """The size is found among them, and set there."""
    clock = Clock()
    finder, data = finder_of(clock), Keywords(batch_size=4)
    net = Bare(None, clock=clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(net, datamodule=data)
    assert finder.result.batch_size == data.loader_kwargs["batch_size"] == 16
    assert set(net.sizes) == {16}


def _trained(trainer: Any, net: Any, data: Any) -> tuple[list[float], list[int], list[float]]:
    pl.seed_everything(5, verbose=False)
    trainer.fit(net, datamodule=data)
    return net.losses, net.sizes, [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]


@pytest.mark.parametrize("reload", [0, 1])
def test_a_size_and_a_rate_that_nobody_keeps(make_trainer: MakeTrainer, reload: int) -> None:
    """Loaders are made again at each call, and the optimizers' groups scaled: the run of those values, bit for bit."""
    clock = Clock()
    finder, data = finder_of(clock, lr_scaling="linear"), Written()
    trainer = make_trainer(callbacks=[finder], max_epochs=2, reload_dataloaders_every_n_epochs=reload)
    found = _trained(trainer, Nowhere(clock=clock), data)
    assert finder.result.batch_size == 16
    assert finder.result.lr_factor == 4
    other = Written()
    other.size = 16
    plain = make_trainer(max_epochs=2, reload_dataloaders_every_n_epochs=reload)
    assert _trained(plain, Nowhere(rate=0.04), other) == found
    assert set(found[1]) == {16}
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    again = make_trainer(max_epochs=1)
    assert set(_trained(again, Nowhere(), data)[1]) == {4}


def fitted_sizes(make_trainer: MakeTrainer, finder: Any, net: Any) -> None:
    trainer = make_trainer(callbacks=[finder], max_epochs=1)
    pl.seed_everything(0, verbose=False)
    trainer.fit(net)
    assert finder.result.batch_size == 16
    assert set(net.sizes) == {16}


def test_a_name_that_is_there_twice_inside_of_hparams_is_ambiguous() -> None:
    """The message asks for a dotted name."""
    net = Bare(None)
    net._hparams.update(train={"batch_size": 4}, val={"batch_size": 8})
    with pytest.raises(TuningError, match="dotted name"):
        find_attribute("batch_size", net)
    found = find_attribute("hparams.val.batch_size", net)
    assert found is not None
    assert found.get() == 8


def test_hparams_that_refer_to_their_parents() -> None:
    """A child of a configuration that knows it is looked into once, whether or not a model has the name itself."""
    config = Namespace(data=Namespace(batch_size=4))
    config.data.parent = config
    for net in (Bare(None), Net()):
        net._hparams["config"] = net._hparams_initial["config"] = config
        found = find_attribute("batch_size", net)
        assert found is not None
        assert found.get() == 4
        assert any(place.holder is config.data for place in found.places) == isinstance(net, Bare)


def collate(rows: list[Any]) -> list[Any]:
    """Some collation of the user's."""
    return rows


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(samples(), 4, drop_last=True, collate_fn=collate),
        DataLoader(samples(), batch_sampler=BatchSampler(SequentialSampler(samples()), 4, drop_last=True)),
    ],
)
def test_a_loader_is_made_again_with_another_size_alone(loader: DataLoader[Any]) -> None:
    """Data set, sampler and collation are the very same, and so is what is done with the last batch."""
    made = resized(loader, 10, "lightning.pytorch")
    assert made.dataset is loader.dataset
    assert made.collate_fn is loader.collate_fn
    assert len(made) == 9
    assert isinstance(made.batch_sampler, BatchSampler)
    assert (made.batch_sampler.batch_size, made.batch_sampler.drop_last) == (10, True)
    assert len(loader) == 24, "the given one is as it was"


def test_a_collection_of_loaders(make_trainer: MakeTrainer) -> None:
    """Each DataLoader of a CombinedLoader is given the size."""

    class Pair(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    clock = Clock()
    finder = finder_of(clock)
    loaders = CombinedLoader({key: DataLoader(samples(), 4) for key in "ab"}, "min_size")
    net = Pair(clock=clock)
    trainer = make_trainer(callbacks=[finder], max_epochs=1)
    trainer.fit(net, loaders)
    assert finder.result.batch_size == 16
    assert net.sizes == [16] * 12


def test_a_custom_batch_sampler_keeps_its_class(make_trainer: MakeTrainer) -> None:
    """What has a batch_size and takes the usual arguments is made again as it was."""

    class Mine(BatchSampler):
        pass

    loader = DataLoader(samples(), batch_sampler=Mine(RandomSampler(samples()), 4, drop_last=False))
    clock = Clock()
    finder = finder_of(clock)
    net = Net(clock=clock)
    trainer = make_trainer(callbacks=[finder], max_epochs=1)
    trainer.fit(net, loader)
    assert set(net.sizes) == {16}
    assert type(trainer.train_dataloader.batch_sampler.sampler) is RandomSampler
    assert type(trainer.train_dataloader.batch_sampler) is Mine


def test_another_value_of_the_same_name_stays(make_trainer: MakeTrainer) -> None:
    """The data's size is that of the loaders; the model's hparams say something else, and go on saying it."""
    clock = Clock()
    finder = finder_of(clock)
    data, net = Data(), Net(batch_size=7, clock=clock)
    data._hparams.clear()  # Lightning refuses hparams that differ
    data._hparams_initial.clear()
    fitted(make_trainer(callbacks=[finder], max_epochs=1), net, datamodule=data)
    assert set(net.sizes) == {16}
    assert (finder.result.configured_batch_size, data.batch_size) == (4, 16)
    assert (net.batch_size, net.hparams.batch_size, net._hparams_initial.batch_size) == (7, 7, 7)


def test_another_rate_of_the_same_name_stays(make_trainer: MakeTrainer) -> None:
    """A model that makes its rate of that in its hparams: those make it again from a checkpoint."""

    class Derived(Net):
        def __init__(self, lr: float = 0.01, **kwargs: Any) -> None:
            super().__init__(lr=lr, **kwargs)
            self.lr = 4 * lr

    clock = Clock()
    finder = finder_of(clock)
    net = Derived(clock=clock)
    state = fitted(make_trainer(callbacks=[finder], max_epochs=1), net)
    assert finder.result.lr_factor == 2.0
    assert (net.lr, net.hparams.lr) == (0.08, 0.01)
    assert state["hparams"][0]["lr"] == 0.01


def test_a_size_that_is_not_the_loaders_stays(make_trainer: MakeTrainer) -> None:
    """Those passed to `fit()` have their own."""
    clock = Clock()
    finder = finder_of(clock)
    net = Net(batch_size=7, clock=clock)
    fitted(make_trainer(callbacks=[finder], max_epochs=1), net, DataLoader(samples(), 4))
    assert set(net.sizes) == {16}
    assert (net.batch_size, net.hparams.batch_size) == (7, 7)
