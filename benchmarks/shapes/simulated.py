"""The same training on a device that is not there: what the planner's own simulator says of it.

A GPT-2 of 12 layers is recorded at eight lengths without running, and priced by the device's datasheet; its graph at
any other length follows from these to the byte. Steps go as in the plugin: by the same family of shapes, which says
what is recorded and what is derived. A recorded step counts as one in which all that is saved goes to the host and
comes back, while nothing else runs; a derived one with what its plan predicts. The time that plans take is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.results import Row
from examples.models import gpt2
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.step_model import StepModel
from lightning_offload.plugins.fake import Step, record_fake_step
from lightning_offload.plugins.shape_families import ShapeFamily

__all__ = ["simulated"]

_DEVICE, _TITLE = "a100", "A100"
_BATCH_SIZE = 8
_NUM_RECORDED = 8


def simulated(lengths: Sequence[int], heights: Sequence[float], goal: float, *, quick: bool) -> list[Row]:
    """Rows like those of the measured cases.

    Args:
        lengths: Of the steps, in tokens.
        heights: Of the budgets, between the floor (0) and the plain peak (1) of the longest.
        goal: For the first of them.
        quick: Whether the model is tiny.
    """
    spec = device_spec(_DEVICE, dtype="float32")
    known = np.linspace(min(lengths), max(lengths), 3 if quick else _NUM_RECORDED).round().astype(int).tolist()
    model = StepModel.fit({(length,): _recorded(length, spec, quick=quick) for length in known})
    rows: list[Row] = []
    for height in heights:
        case = f"GPT-2, {min(lengths)} to {max(lengths)} tokens, {_TITLE} (simulated), h = {height}"
        longest = PlanRequest(Problem(model.at((max(lengths),))), spec, None)
        floor_bytes, plain_bytes = longest.floor.peak_bytes, longest.plain.peak_bytes
        budget_bytes = floor_bytes + round(height * (plain_bytes - floor_bytes))
        taken, plain, num_recorded = _changing(model, lengths, spec, budget_bytes)
        alone = []
        for length in known:
            made = plan(model.at((length,)), spec, budget_bytes)
            alone.append(made.predicted_step_seconds / made.plain_step_seconds)
        expected = float(sum(np.interp(lengths, known, alone) * np.array(plain)))
        rows += [
            Row(case=case, metric="changing_over_one_length", value=sum(taken) / expected,
                goal=goal if height == heights[0] else None),
            Row(case=case, metric="ratio", value=sum(taken) / sum(plain)),
            Row(case=case, metric="one_length_ratio", value=expected / sum(plain)),
            Row(case=case, metric="num_recorded", value=float(num_recorded)),
            Row(case=case, metric="budget_bytes", value=float(budget_bytes)),
        ]  # fmt: skip
    return rows


def _recorded(length: int, spec: DeviceSpec, *, quick: bool) -> StepGraph:
    def build() -> tuple[nn.Module, Step]:
        model = gpt2().train() if not quick else _tiny()
        tokens = torch.zeros(_BATCH_SIZE, length, dtype=torch.long)
        return model, lambda: model(input_ids=tokens, labels=tokens).loss.backward()

    return record_fake_step(build, spec)


def _tiny() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, use_cache=False)).train()


def _changing(
    model: StepModel, lengths: Sequence[int], spec: DeviceSpec, budget_bytes: int
) -> tuple[list[float], list[float], int]:
    """What the steps take, what plain ones do, and how many of them are recorded."""
    family = ShapeFamily("simulated")
    taken, plain, num_recorded = [], [], 0
    for length in lengths:
        graph = model.at((length,))
        plain.append(graph.seconds)
        extrapolated = family.find((_BATCH_SIZE, length))
        if extrapolated is None:
            num_recorded += 1
            taken.append(_floor_seconds(graph, spec))
            family.learn(str(length), (_BATCH_SIZE, length), graph)
            continue
        planner = family.planner
        figures = planner.model.figures_at(extrapolated.point)
        made = planner.plan(planner.model.sized(figures), figures, spec, budget_bytes)
        taken.append(graph.seconds * made.predicted_step_seconds / made.plain_step_seconds)
    return taken, plain, num_recorded


def _floor_seconds(graph: StepGraph, spec: DeviceSpec) -> float:
    """A step in which everything saved is copied out and back while nothing else runs."""
    saved = {graph.values[save.value].storage for save in graph.saves}
    sizes = (graph.storages[storage] for storage in saved)
    num_bytes = sum(storage.num_bytes for storage in sizes if not storage.is_persistent)
    return graph.seconds + num_bytes * (1 / spec.d2h_bytes_per_second + 1 / spec.h2d_bytes_per_second)
