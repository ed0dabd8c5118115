"""Building `DDPOffloadStrategy`: its keywords, its names, and how it travels; `tests/distributed` has it run."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_offload
from lightning_offload import BudgetError, DDPOffloadStrategy, OffloadStrategy, UnsupportedError
from tests.lightning.conftest import MakeTrainer
from tests.lightning.models import ConvNet, Gan, assert_same, fit_and_read, images

STRATEGY = "lightning_offload.DDPOffloadStrategy"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Lightning leaves the address of a process group in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_public_name() -> None:
    """It is a DDPStrategy under its public name, and is not the strategy of one device."""
    assert f"{DDPOffloadStrategy.__module__}.{DDPOffloadStrategy.__qualname__}" == STRATEGY
    assert issubclass(DDPOffloadStrategy, DDPStrategy)
    assert not issubclass(DDPOffloadStrategy, OffloadStrategy)
    assert not issubclass(OffloadStrategy, DDPOffloadStrategy)


def test_keywords_are_those_of_the_other_strategy_and_ddps() -> None:
    """It takes OffloadStrategy's keywords, with the same defaults, and hands the rest to DDPStrategy."""
    ours = dict(inspect.signature(DDPOffloadStrategy).parameters)
    single = dict(inspect.signature(OffloadStrategy).parameters)
    assert list(ours) == [*single, "kwargs"]
    assert {name: ours[name] for name in single} == single
    strategy = DDPOffloadStrategy(
        "1GiB", policy="all-swap", timeout=timedelta(seconds=7), process_group_backend="gloo", static_graph=True
    )
    assert strategy.memory.budget_bytes == 2**30
    assert strategy._timeout == timedelta(seconds=7)
    assert strategy.process_group_backend == "gloo"
    assert strategy._ddp_kwargs == {"static_graph": True}


def test_documentation_has_both_summaries() -> None:
    """The docstring says what the strategy is and explains the shared keywords."""
    for strategy, summary in ((DDPOffloadStrategy, "several devices"), (OffloadStrategy, "one device")):
        text = str(strategy.__doc__)
        assert summary in text
        assert text.count("Args:") == 1
        assert "Peak bytes of tensors alive" in text


@pytest.mark.parametrize(
    ("name", "start_method", "ddp"),
    [
        ("ddp_offload", "popen", {}),
        ("ddp_offload_spawn", "spawn", {}),
        ("ddp_offload_fork", "fork", {}),
        ("ddp_offload_notebook", "fork", {}),
        ("ddp_offload_find_unused_parameters_true", "popen", {"find_unused_parameters": True}),
        (STRATEGY, "popen", {}),
    ],
)
def test_registered_names(make_trainer: MakeTrainer, name: str, start_method: str, ddp: dict[str, Any]) -> None:
    """`Trainer(strategy=...)` takes each name, as Lightning's own names of DDP are formed."""
    assert name.lower() in StrategyRegistry.available_strategies()
    strategy = make_trainer(strategy=name, devices=2).strategy
    assert isinstance(strategy, DDPOffloadStrategy)
    assert strategy._start_method == start_method
    assert strategy._ddp_kwargs == ddp
    assert strategy.num_processes == 2


def test_offload_under_torchrun(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name "offload" stands for DDP where torchrun started several processes, and only there."""
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert isinstance(make_trainer(strategy="offload", devices=2).strategy, DDPOffloadStrategy)
    with pytest.raises(UnsupportedError, match=r"2 were asked for: use DDPOffloadStrategy .*'ddp_offload'"):
        make_trainer(strategy=OffloadStrategy("1GiB"), devices=2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(make_trainer(strategy="offload").strategy, OffloadStrategy)


def test_unknown_device() -> None:
    """A device that is neither a CPU nor CUDA is one clear error."""
    with pytest.raises(UnsupportedError, match=r"'mps:0' yet.*accelerator='cpu'"):
        DDPOffloadStrategy("1GiB").parallel_devices = [torch.device("mps", 0)]


def test_bad_keywords(make_trainer: MakeTrainer) -> None:
    """What is wrong with the budget, the precision or DDP's keywords is said where it is written."""
    with pytest.raises(BudgetError):
        DDPOffloadStrategy("12 bananas")
    with pytest.raises(UnsupportedError, match="FSDP is not supported"):
        make_trainer(strategy=DDPOffloadStrategy("1GiB"), devices=2, plugins=FSDPPrecision("bf16-mixed"))
    with pytest.raises(ValueError, match="'bananas' is not available"):
        make_trainer(strategy=DDPOffloadStrategy("1GiB", start_method="bananas"), devices=2)


@pytest.mark.parametrize("cls", [OffloadStrategy, DDPOffloadStrategy])
def test_pickling_leaves_the_plugin_behind(cls: type[Any]) -> None:
    """A pickled strategy has the same keywords and a plugin of its own, as launchers that spawn need it."""
    strategy = cls("12GiB", policy="all-swap", keep=["head*"])
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is cls
    assert again.memory is not strategy.memory
    assert (again.memory.budget_bytes, again.memory.policy) == (12 * 2**30, "all-swap")
    assert again.memory._steps.settings == strategy.memory._steps.settings


def test_one_process(make_trainer: MakeTrainer) -> None:
    """With one device it trains as plain DDP with one device does, automatically and manually."""
    for model in (ConvNet, Gan):
        states = []
        for strategy in (DDPStrategy, lambda **ddp: DDPOffloadStrategy("1GiB", policy="all-swap", **ddp)):
            torch.manual_seed(3)
            trainer = make_trainer(strategy=strategy(find_unused_parameters=model is Gan))
            try:
                states.append(fit_and_read(trainer, model()))
            finally:
                torch.distributed.destroy_process_group()
        assert_same(states[1], states[0])


def test_exception_takes_everything_off(make_trainer: MakeTrainer) -> None:
    """After an exception in a step neither the plugin nor the precision plugin is in force; conftest sees the rest."""

    class Breaks(ConvNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise KeyError("in a step")
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(strategy=DDPOffloadStrategy("1GiB", policy="all-swap"))
    plain_class = type(trainer.precision_plugin)
    try:
        with pytest.raises(KeyError):
            trainer.fit(Breaks(), images())
    finally:
        torch.distributed.destroy_process_group()
    assert type(trainer.precision_plugin) is plain_class
    assert trainer.strategy.memory.report().num_steps == 4


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What LightningCLI builds from flags, without running."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning uses an older form of its API
    monkeypatch.setattr(sys, "argv", ["cli"])

    def parse(*flags: str) -> Any:
        quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
        args = [*quiet, "--trainer.devices=2", *flags]
        return LightningCLI(ConvNet, args=args, run=False, save_config_callback=None, seed_everything_default=0)

    return parse


def test_cli(cli: Any) -> None:
    """LightningCLI takes the keywords of both kinds, typed."""
    strategy = cli(
        f"--trainer.strategy={STRATEGY}",
        "--trainer.strategy.init_args.budget=12GiB",
        "--trainer.strategy.init_args.verify=never",
        "--trainer.strategy.init_args.process_group_backend=gloo",
        "--trainer.strategy.init_args.find_unused_parameters=true",
    ).trainer.strategy
    assert isinstance(strategy, DDPOffloadStrategy)
    assert strategy.memory.budget_bytes == 12 * 2**30
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    assert strategy.process_group_backend == "gloo"
    assert isinstance(cli("--trainer.strategy=ddp_offload").trainer.strategy, DDPOffloadStrategy)


def test_cli_help(cli: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help explains our keywords and lists DDP's."""
    with pytest.raises(SystemExit) as left:
        cli(f"--trainer.strategy.help={STRATEGY}")
    assert left.value.code == 0
    text = capsys.readouterr().out
    for keyword in ("budget", "spill_dir", "verify", "timeout", "start_method", "static_graph", "bucket_cap_mb"):
        assert f"--trainer.strategy.{keyword}" in text, keyword
    assert "Peak bytes of tensors alive" in text


def test_the_other_lightning_package() -> None:
    """Built for one of the two Lightnings, it becomes the other's, with its keywords, in that one's Trainer."""
    code = """
import lightning.pytorch, lightning_offload, pytorch_lightning, datetime
strategy = lightning_offload.DDPOffloadStrategy("1GiB", timeout=datetime.timedelta(seconds=7), static_graph=True)
trainer = pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
assert isinstance(strategy, pytorch_lightning.strategies.DDPStrategy), type(strategy).__mro__
assert isinstance(strategy, lightning_offload.DDPOffloadStrategy)
assert not isinstance(strategy, lightning_offload.OffloadStrategy)
assert (strategy._timeout.seconds, strategy._ddp_kwargs) == (7, {"static_graph": True})
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_exported() -> None:
    """It is found lazily on the package."""
    assert lightning_offload.DDPOffloadStrategy is DDPOffloadStrategy
