"""LightningCLI builds the strategy from flags and files, and explains its keywords."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_offload
from lightning_offload.planning.planner import POLICIES
from tests.lightning.models import ConvNet

STRATEGY = "lightning_offload.OffloadStrategy"
ROOT = Path(__file__).parents[2]


def parsed(*flags: str) -> LightningCLI:
    """What the CLI builds from `flags`, without running."""
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    return LightningCLI(ConvNet, args=[*quiet, *flags], run=False, save_config_callback=None, seed_everything_default=0)


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning uses an older form of its API
    monkeypatch.setattr(sys, "argv", ["cli"])


def test_keywords_from_flags() -> None:
    """Every kind of keyword arrives typed."""
    strategy = parsed(
        f"--trainer.strategy={STRATEGY}",
        "--trainer.strategy.init_args.budget=12GiB",
        "--trainer.strategy.init_args.keep=[head*]",
        "--trainer.strategy.init_args.verify=never",
        "--trainer.strategy.init_args.enabled=false",
    ).trainer.strategy
    assert isinstance(strategy, lightning_offload.OffloadStrategy)
    assert strategy.memory.budget_bytes == 12 * 2**30
    assert strategy.memory.enabled is False


@pytest.mark.parametrize(("text", "num_bytes"), [("12GB", 12 * 10**9), ("20000000", 20_000_000), ("null", None)])
def test_budget_spellings(text: str, num_bytes: int | None) -> None:
    """Texts, integers and null are read as Python writes them."""
    cli = parsed(f"--trainer.strategy={STRATEGY}", f"--trainer.strategy.init_args.budget={text}")
    assert cli.trainer.strategy.memory.budget_bytes == num_bytes


@pytest.mark.parametrize("name", ["offload", STRATEGY])
def test_names_alone(name: str) -> None:
    """The registered name and the bare class path need no keyword."""
    assert isinstance(parsed(f"--trainer.strategy={name}").trainer.strategy, lightning_offload.OffloadStrategy)


def test_file_and_flag(tmp_path: Path) -> None:
    """A flag overrides a configuration file, which may name the monitor too."""
    config = tmp_path / "config.yaml"
    config.write_text(
        f"trainer:\n  strategy:\n    class_path: {STRATEGY}\n"
        "    init_args: {budget: 2GiB, policy: all-swap}\n"
        "  callbacks:\n    - class_path: lightning_offload.OffloadMonitor\n"
    )
    trainer = parsed(f"--config={config}", "--trainer.strategy.init_args.budget=3GiB").trainer
    assert trainer.strategy.memory.budget_bytes == 3 * 2**30
    assert trainer.strategy.memory.policy == "all-swap"
    assert any(isinstance(callback, lightning_offload.OffloadMonitor) for callback in trainer.callbacks)


def test_help_lists_the_keywords(capsys: pytest.CaptureFixture[str]) -> None:
    """The help names every keyword and says what a budget is."""
    with pytest.raises(SystemExit) as left:
        parsed(f"--trainer.strategy.help={STRATEGY}")
    assert left.value.code == 0
    text = capsys.readouterr().out
    for keyword in (
        "budget",
        "policy",
        "tier",
        "host_budget",
        "spill_dir",
        "plan",
        "keep",
        "enabled",
        "verify",
    ):
        assert f"--trainer.strategy.{keyword}" in text
    assert "Peak bytes of tensors alive" in text
    words = re.sub(r"-\s*\n\s+", "-", text)  # where argparse broke a line
    assert all(f'"{policy}"' in words for policy in POLICIES)


def test_bad_budget() -> None:
    """A budget that cannot be read ends the program with our message."""
    with pytest.raises(ValueError, match="budget '12 bananas'"):
        parsed(f"--trainer.strategy={STRATEGY}", "--trainer.strategy.init_args.budget=12 bananas")


def test_printed_config_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --print_config writes can be read back."""
    with pytest.raises(SystemExit):
        parsed(f"--trainer.strategy={STRATEGY}", "--trainer.strategy.init_args.budget=2GiB", "--print_config")
    config = tmp_path / "config.yaml"
    config.write_text(capsys.readouterr().out)
    assert parsed(f"--config={config}").trainer.strategy.memory.budget_bytes == 2 * 2**30
