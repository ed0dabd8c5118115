"""Building the strategy: keywords, devices, and what is refused."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_offload
from lightning_offload import (
    BudgetError,
    BudgetInfeasibleError,
    MemoryPlugin,
    OffloadStrategy,
    PlanError,
    PolicyError,
    UnsupportedError,
)
from tests.lightning.conftest import MakeTrainer
from tests.lightning.models import ConvNet, images


def test_keywords_are_those_of_the_plugin() -> None:
    """The strategy takes the plugin's keywords, with the same defaults, all annotated."""
    ours = dict(inspect.signature(OffloadStrategy).parameters)
    plugins = dict(inspect.signature(MemoryPlugin).parameters)
    assert list(ours) == [name for name in plugins if name not in ("device", "module")]
    for name, parameter in ours.items():
        assert parameter.default == plugins[name].default, name
        assert parameter.annotation is not inspect.Parameter.empty, name


def test_public_name() -> None:
    """The class is found under its public name, and is one of Lightning's strategies."""
    assert OffloadStrategy is lightning_offload.OffloadStrategy
    assert f"{OffloadStrategy.__module__}.{OffloadStrategy.__qualname__}" == "lightning_offload.OffloadStrategy"
    assert issubclass(OffloadStrategy, SingleDeviceStrategy)


@pytest.mark.parametrize("name", ["offload", "lightning_offload.OffloadStrategy"])
def test_registered_names(make_trainer: MakeTrainer, name: str) -> None:
    """`Trainer(strategy=...)` takes the short name and the class path, and the name stays registered once."""
    assert isinstance(make_trainer(strategy=name).strategy, OffloadStrategy)
    assert name.lower() in StrategyRegistry.available_strategies()


def test_a_name_and_the_environment_serve_two_trainers(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As frameworks make a second one of the same arguments, which one instance of a strategy is refused in."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_BUDGET", "64MiB")
    for _ in range(2):
        trainer = make_trainer(strategy="offload", accelerator="cpu")
        trainer.fit(ConvNet(), images(5))
        assert trainer.strategy.memory.report().budget_bytes == 64 << 20


def test_without_budget_says_so_and_keeps_everything(make_trainer: MakeTrainer) -> None:
    """`strategy="offload"` on a CPU trains and warns once that no budget is known."""
    trainer = make_trainer(strategy="offload")
    with pytest.warns(UserWarning, match="has no budget") as caught:
        trainer.fit(ConvNet(), images(5))
    assert len([w for w in caught if "budget" in str(w.message)]) == 1
    report = trainer.strategy.memory.report()
    assert report.budget_bytes is None
    assert (report.swapped_bytes, report.recomputed_bytes, report.num_steps) == (0, 0, 5)


def test_bad_keyword() -> None:
    """What the plugin refuses, a budget among it, is refused where it is written."""
    with pytest.raises(BudgetError, match="12 bananas"):
        OffloadStrategy("12 bananas")
    for keyword in ("policy", "tier", "verify"):
        with pytest.raises(PolicyError, match="bananas"):
            OffloadStrategy("1GiB", **{keyword: "bananas"})
    with pytest.raises(BudgetError, match="12 bananas"):
        OffloadStrategy("1GiB", host_budget="12 bananas")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (OffloadStrategy, "OffloadStrategy"),
        (lightning_offload.DDPOffloadStrategy, "DDPOffloadStrategy"),
        (lightning_offload.OffloadMonitor, "OffloadMonitor"),
        (lightning_offload.EfficientBatchSizeFinder, "EfficientBatchSizeFinder"),
    ],
)
def test_a_keyword_that_there_is_not(make: Any, name: str) -> None:
    """The error names the class that the user wrote."""
    with pytest.raises(TypeError, match=rf"^{name}(\.__init__)?\(\) got an unexpected keyword argument 'bugdet'"):
        make(bugdet="1GiB")


def test_keywords_that_ddp_takes() -> None:
    """DDPStrategy's own, and those that it hands on."""
    strategy = lightning_offload.DDPOffloadStrategy("1GiB", find_unused_parameters=True, process_group_backend="gloo")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    with pytest.raises(TypeError, match="'bucket_cap': did you mean 'bucket_cap_mb'"):
        lightning_offload.DDPOffloadStrategy(bucket_cap=25)


def test_plan_that_is_none(tmp_path: Path) -> None:
    """A file that is not a plan is refused where it is named."""
    path = tmp_path / "plan.json"
    path.write_text('{"layers": 3}')
    with pytest.raises(PlanError):
        OffloadStrategy("1GiB", plan=path)


def test_infeasible_budget(make_trainer: MakeTrainer) -> None:
    """A budget below what the step needs is an error that names the smallest feasible one, which works."""
    trainer = make_trainer(strategy=OffloadStrategy("100 kB"))
    with pytest.raises(BudgetInfeasibleError) as raised:
        trainer.fit(ConvNet(), images())
    assert raised.value.budget_bytes == 100_000 < raised.value.floor_bytes
    assert type(trainer.precision_plugin).__mro__[0].__module__.startswith("lightning.pytorch")
    make_trainer(strategy=OffloadStrategy(f"{raised.value.floor_bytes}B")).fit(ConvNet(), images())


def test_several_devices(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one device, node or process is one clear error."""
    with pytest.raises(UnsupportedError, match=r"2 were asked for.*devices=1"):
        make_trainer(strategy="offload", devices=2)
    with pytest.raises(UnsupportedError, match=r"num_nodes=2.*DDPOffloadStrategy"):
        make_trainer(strategy="offload", num_nodes=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UnsupportedError, match="4 were asked for"):
        make_trainer(strategy="offload")


def test_unknown_device() -> None:
    """A device that is neither a CPU nor CUDA is one clear error."""
    strategy = OffloadStrategy("1GiB")
    with pytest.raises(UnsupportedError, match=r"'mps:0' yet.*accelerator='cpu'"):
        strategy.parallel_devices = [torch.device("mps", 0)]


def test_cuda_device_is_taken() -> None:
    """The Trainer's choice of device is the strategy's root device."""
    strategy = OffloadStrategy("1GiB")
    assert not strategy.parallel_devices
    strategy.parallel_devices = [torch.device("cuda", 3)]
    assert strategy.root_device == torch.device("cuda", 3)


def test_sharding_precision(make_trainer: MakeTrainer) -> None:
    """FSDP's precision plugin is refused while the Trainer is built."""
    with pytest.raises(UnsupportedError, match="FSDP is not supported"):
        make_trainer(strategy=OffloadStrategy("1GiB"), plugins=FSDPPrecision("bf16-mixed"))


def test_other_strategies_do_not_mix(make_trainer: MakeTrainer) -> None:
    """There is one strategy per Trainer: the monitor of another one is one clear error."""
    trainer = make_trainer(callbacks=[lightning_offload.OffloadMonitor()], enable_progress_bar=True)
    with pytest.raises(MisconfigurationException, match="SingleDeviceStrategy"):
        trainer.fit(ConvNet(), images())


def test_subclass(make_trainer: MakeTrainer) -> None:
    """The strategy can be subclassed like any other."""

    class Mine(OffloadStrategy):
        pass

    trainer = make_trainer(strategy=Mine("1GiB"))
    trainer.fit(ConvNet(), images(2))
    assert type(trainer.strategy) is Mine
    assert not issubclass(OffloadStrategy, Mine)


class Sized(ConvNet):
    """As finders want it: with a batch size, and a loader of its own."""

    batch_size = 4

    def train_dataloader(self) -> Any:
        """Batches of that size."""
        return images(5, self.batch_size)


@pytest.mark.parametrize("budget", ["64MiB", None])
def test_lightnings_own_finder_is_told_of(make_trainer: MakeTrainer, budget: str | None) -> None:
    """It takes no size for too large that the budget does not hold; ours does."""
    finders = [BatchSizeFinder(max_trials=1), lightning_offload.EfficientBatchSizeFinder(max_val=4)]
    told = []
    for finder in finders:
        trainer = make_trainer(strategy=OffloadStrategy(budget), callbacks=[finder])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(MisconfigurationException):  # Lightning's wants a loader for validation
                trainer.fit(Sized())
        told.append(sum("BatchSizeFinder ends with the error" in str(each.message) for each in caught))
    assert told == [int(budget is not None), 0]
