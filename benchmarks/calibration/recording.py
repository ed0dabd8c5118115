"""What each publicly measured step has to do, recorded without a device and stored by kind, count and size.

Recordings are those that plans are made of: fake tensors, on which the step calls CUDA's kernels, under CUDA's autocast
for AMP. A step that several cards share is recorded for the first of them by name. The optimizer's traffic is added as
one op.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.calibration.models import MODELS
from benchmarks.calibration.public import DTYPES, Optimizer, Public, card_of
from examples.models.registry import default_dtype
from lightning_offload.capture.roofline import Work
from lightning_offload.graph.calibration import Arithmetic
from lightning_offload.graph.catalog import arithmetic_of, spec_of
from lightning_offload.graph.work_kinds import WorkKind
from lightning_offload.plugins.fake import record_fake

STORED = Path(__file__).with_name("works.json")

_OPTIMIZER_BYTES: dict[Optimizer, int] = {"none": 0, "sgd": 44, "adam": 28}
"""Bytes read and written for each parameter: the eleven passes of float32 that PyTorch's momentum SGD with weight decay
makes with foreach; the seven of a fused Adam (parameter, gradient and two moments read, all but the gradient written).
"""

Step = tuple[tuple[Work, int], ...]
"""Each work with how often a step does it."""


def record(row: Public) -> tuple[Step, int]:
    """Record what a row's step does, without its optimizer; returns it with the number of parameters."""
    example, is_amp, sizes = MODELS[row.model], row.precision == "amp" and row.casting == "autocast", {}
    device = spec_of(card_of(row), DTYPES[row.precision])
    dtype = torch.bfloat16 if row.precision == "amp" and row.casting == "model" else torch.float32

    def build() -> tuple[nn.Module, Callable[[], None]]:
        with default_dtype(dtype):
            model = example.build().train()
        inputs = example.inputs(row.batch_size, dtype)
        sizes["parameters"] = sum(parameter.numel() for parameter in model.parameters())

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16) if is_amp else contextlib.nullcontext():
                loss = example.loss(model, inputs)
            loss.backward()

        return model, step

    counts = Counter(work for work in record_fake(build, device).work if work.flops or work.num_bytes)
    return tuple(sorted(counts.items(), key=_order)), sizes["parameters"]


def _order(item: tuple[Work, int]) -> tuple[str, float, int]:
    return item[0].kind.value, item[0].flops, item[0].num_bytes


def with_optimizer(step: Step, num_parameters: int, optimizer: Optimizer) -> Step:
    """The step and its optimizer's traffic."""
    num_bytes = _OPTIMIZER_BYTES[optimizer] * num_parameters
    return (*step, (Work(0.0, num_bytes), 1)) if num_bytes else step


def with_transposes(step: Step, cores: Arithmetic) -> Step:
    """The step with what cuDNN does around each convolution of nchw tensors on tensor cores: to nhwc and back."""
    if cores == "float32":
        return step
    moved = [
        (Work(0.0, 2 * work.num_bytes), count) for work, count in step if work.kind is WorkKind.CONVOLUTION
    ]  # fmt: skip
    return (*step, *moved)


def steps(rows: tuple[Public, ...], *, advance: Callable[[str], None] = lambda name: None, fresh: bool = False) -> None:
    """Record all steps that are not stored, or all of them, and store them."""
    stored = {} if fresh else _load()
    for row in rows:
        advance(row.step)
        if row.step not in stored:
            step, num_parameters = record(row)
            stored[row.step] = _encoded(step, num_parameters)
    wanted = sorted({row.step for row in rows})
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(stored[name], separators=(',', ':'))}" for name in wanted)
    STORED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def stored_steps(rows: tuple[Public, ...]) -> list[Step]:
    """The stored step of each row, with its optimizer and with what its layout costs."""
    stored = {name: _decoded(data) for name, data in _load().items()}
    found = []
    for row in rows:
        step = with_optimizer(*stored[row.step], row.optimizer)
        cores = arithmetic_of(card_of(row), DTYPES[row.precision])
        found.append(with_transposes(step, cores) if row.layout == "nchw" else step)
    return found


def _load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    return found


def _encoded(step: Step, num_parameters: int) -> dict[str, Any]:
    by_kind: dict[str, list[list[int]]] = {}
    for work, count in step:
        by_kind.setdefault(work.kind.name, []).append([round(work.flops), work.num_bytes, count])
    return {"parameters": num_parameters, "works": by_kind}


def _decoded(data: dict[str, Any]) -> tuple[Step, int]:
    return tuple(_works(data["works"])), data["parameters"]


def _works(by_kind: dict[str, list[list[int]]]) -> Iterator[tuple[Work, int]]:
    for kind, works in by_kind.items():
        for flops, num_bytes, count in works:
            yield Work(float(flops), num_bytes, WorkKind[kind]), count
