"""A plan that the command line made is in force from the first training step on, whatever runs the loop."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_offload import MemoryPlugin
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.files import sibling_graph
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from tests.adapters import trainings
from tests.adapters.test_transformers import quiet as quiet
from tests.adapters.trainings import BATCH_SIZE, NUM_STEPS, NUM_TOKENS, Seen
from tests.cli.running import json_of
from tests.engine.conftest import tensors_alone as tensors_alone
from tests.shares import is_all

IMAGES = ("--input", "3x16x16", "--input", "int64:")
CRITERION = ("--loss", "torch.nn.functional:cross_entropy")
TOKENS = ("--input", f"input_ids=int64:{NUM_TOKENS}", "--input", f"labels=int64:{NUM_TOKENS}")
Train = Callable[[Path, "dict[str, Any] | None"], Seen]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A training.

    Attributes:
        arguments: What is planned.
        train: Trains, in a folder, with keywords for the plugin; None for plainly.
    """

    arguments: tuple[str, ...]
    train: Train


def lightning(name: str, *options: str, **settings: Any) -> Setting:
    """A fit of Lightning's."""
    module = getattr(trainings, name)
    return Setting(
        (f"tests.adapters.trainings:{name}", *IMAGES, *options),
        lambda folder, offload: trainings.fit(module, folder, offload, **settings),
    )


SETTINGS = {
    "AdamW, logging": lightning("LitLogging"),
    "SGD, logging": lightning("LitSgdLogging"),
    "bf16-mixed": lightning("LitLogging", "--precision", "bf16-mixed", precision="bf16-mixed"),
    "accumulation": lightning("LitLogging", "--accumulate", "3", accumulate_grad_batches=3),
    "Accelerate": Setting(
        ("tests.adapters.trainings:net", *IMAGES, *CRITERION, "--optimizer", "adamw"),
        lambda folder, offload: trainings.accelerate(offload),
    ),
    "HF Trainer": Setting(("tests.adapters.trainings:gpt2", *TOKENS, "--optimizer", "adamw"), trainings.hugging_face),
    **({"AdamW": lightning("Lit"), "SGD": lightning("LitSgd")} if is_all() else {}),
}  # fmt: skip
"""The last do what others do that log beside it."""


def planned(capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], share: float) -> Path:
    """A plan for this machine at a budget this far from the floor to the plain peak."""
    here = dataclasses.replace(device_spec("k40c"), name="this machine", kind="cpu", compute_capability=0)
    (folder / "here.json").write_text(here.to_json())
    command = ("plan", *arguments, "--batch-size", str(BATCH_SIZE), "--device", str(folder / "here.json"))
    found = json_of(capsys, *command)
    budget = int(found["floor_bytes"] + share * (found["plain_peak_bytes"] - found["floor_bytes"]))
    path = folder / "plan.json"
    json_of(capsys, *command, "--budget", f"{budget}B", "--output", str(path))
    return path


@pytest.fixture(autouse=True, scope="module")
def links_known(calibrated_once: None) -> None:
    """The links are measured before: what that takes on the device for a moment is no step's."""
    with MemoryPlugin("1GiB", policy="all-swap", device="cpu") as memory:
        for _ in range(2):
            x = torch.randn(64, requires_grad=True)
            with memory.step(x):
                x.exp().exp().sum().backward()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the package warned of."""
    records = (record for record in caplog.records if record.name.startswith("lightning_offload"))
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("setting", SETTINGS)
def test_in_force_from_the_first_step(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each step runs under it, gives plain training's gradients bit for bit, and has its true peak in the budget."""
    path = planned(capsys, tmp_path, SETTINGS[setting].arguments, 0.5)
    train = SETTINGS[setting].train
    plain = train(tmp_path, None)
    caplog.clear()
    seen = train(tmp_path, {"plan": path})
    assert warnings_in(caplog) == []
    assert seen.phases == ["planned"] * NUM_STEPS
    assert seen.gradients == plain.gradients
    assert seen.memory is not None
    budget = seen.memory.budget_bytes
    assert budget is not None
    assert max(seen.peaks) <= budget < max(plain.peaks)
    plan, graph = MemoryPlan.from_json(path.read_text()), StepGraph.from_json(sibling_graph(path).read_text())
    report = seen.memory.report()
    assert report.swapped_bytes == plan.bytes_of(graph, "swap")
    assert report.recomputed_bytes == plan.bytes_of(graph, "recompute")
    assert report.swapped_bytes + report.recomputed_bytes > 0
