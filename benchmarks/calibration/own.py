"""This project's own measurements of plain steps on GPUs beside what is modelled: none of them is in the fit.

Read from the GPU suite's stored results; the steps that they measured are recorded without a device.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.calibration.checking import seconds_of
from benchmarks.calibration.recording import Step
from benchmarks.gpu.cases import MODELS
from benchmarks.gpu.models import workload
from lightning_offload.graph.catalog import find_card, spec_of
from lightning_offload.plugins.fake import record_fake

_CARDS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}
"""The catalogue's names, by what the driver calls a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A plain step that was measured here.

    Attributes:
        model: Its title.
        sizes: What it was run with, ready for JSON.
        device: What the driver calls the GPU.
        torch_version: Which torch ran.
        seconds: What it took, the median of the cases that measured it.
        modelled_seconds: What is predicted.
    """

    model: str
    sizes: dict[str, Any]
    device: str
    torch_version: str
    seconds: float
    modelled_seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.modelled_seconds / self.seconds - 1


def measured_here(folder: Path) -> list[Own]:
    """All float32 steps in a folder's results of the GPU suite, on GPUs of the catalogue; each is recorded anew."""
    found = []
    for path in sorted(folder.glob("gpu-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["device"] in _CARDS:
            found += _of(result)
    return found


def _of(result: dict[str, Any]) -> Iterator[Own]:
    device = spec_of(find_card(_CARDS[result["device"]]), "float32")
    for name, title in MODELS.items():
        sizes = [
            sizes
            for key, sizes in result["config"].items()
            if key.endswith(f"-{name}") and sizes.get("precision") == "fp32"
        ]
        seconds = [
            row["value"]
            for row in result["rows"]
            if row["metric"] == "plain_step_seconds" and row["case"].startswith(f"{title}, ")
        ]
        if seconds and sizes:
            yield Own(
                model=title,
                sizes=sizes[0],
                device=result["device"],
                torch_version=result["environment"]["versions"]["torch"],
                seconds=statistics.median(seconds),
                modelled_seconds=seconds_of(_record(name, sizes[0]["batch_size"]), device),
            )


def _record(name: str, batch_size: int) -> Step:
    """What a step of the GPU suite does on a GPU."""

    def build() -> tuple[nn.Module, Callable[[], None]]:
        trained = workload(name, torch.device("cpu"), quick=False, batch_size=batch_size)
        return trained.model, trained.step

    counts = Counter(work for work in record_fake(build, spec_of(find_card("h200"), "float32")).work)
    return tuple(counts.items())
