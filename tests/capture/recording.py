"""Records a step the way the plugin does, without the plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_offload.capture.recorder import Recorder
from lightning_offload.graph import StepGraph
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.lanes import CopyLanes, FakeLanes
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.tensors.observer import StepObserver, observe_all
from tests.runtime.inline import inline_lanes

CPU = torch.device("cpu")


def observe(step: Callable[[], Any], *observers: StepObserver, lanes: CopyLanes | None = None) -> None:
    """Run a step under the offload-all fallback with observers."""
    executor = StepExecutor(
        device=CPU,
        tiers=Tiers(lanes or inline_lanes()),
        program=None,
        observer=observe_all(observers),
        verifier=None,
    )
    with executing(executor):
        step()


def record(step: Callable[[], Any], module: torch.nn.Module | None = None, *, fake: bool = False) -> StepGraph:
    """Record a step that runs on the CPU, really or under the FakeTensorMode in force."""
    recorder = Recorder(CPU, module)
    observe(step, recorder, lanes=FakeLanes() if fake else None)
    return recorder.finish()


def op_names(graph: StepGraph, phase: str = "forward") -> list[str]:
    """Names of a phase's ops, without namespace."""
    return [op.name.removeprefix("aten.") for op in graph.ops if op.phase == phase]


def sizes(graph: StepGraph, values: tuple[int, ...]) -> list[int]:
    """Bytes of the storages of values."""
    return [graph.storages[graph.values[v].storage].num_bytes for v in values]
