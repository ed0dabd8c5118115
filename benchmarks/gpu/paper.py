"""The papers' settings, measured: training within the memory of the card that a paper had, plainly and by policies.

A process may reserve no more than that card had, beside its context. All ways train the same steps from the same
parameters, with momentum, and are compared with plain training on the whole device: in time, and bit for bit. cuDNN is
held to algorithms that give the same bits twice, for all alike. A way that does not fit is noted, and the others go on.

On a CPU, where nothing caps a process, a way fits whose peak is below the cap: enough to try the cases.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.max_batch import is_out_of_memory, refusal
from benchmarks.gpu.memory import Peak, free_memory, peak_within
from benchmarks.gpu.models import without_tf32
from benchmarks.pairs import synchronize
from benchmarks.papers.rows_depth import network
from benchmarks.results import Measurements, Row
from examples.models import MODELS, Example, ResNet
from examples.models.registry import image_example, seq2seq_example
from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.units import format_bytes

PLAIN = "plain"
MARGIN = 0.03
"""Of the cap, which the budget leaves to what the allocator holds beyond tensors."""

_NUM_STEPS, _NUM_TIMED = 9, 4
_QUICK_BATCH_SIZE = 16
_MOST_QUICK_BLOCKS = 12
_QUICK_SHARE = 0.8


def example_of(name: str, *, quick: bool) -> Example:
    """Return a network by name: one of the examples, ``resnet-DEPTH`` or ``seq2seq-LENGTH``; a tiny one of its kind.

    Raises:
        ValueError: There is no such network.
    """
    kind, _, size = name.partition("-")
    if kind == "seq2seq" and size.isdecimal():
        if quick:
            return seq2seq_example(length=12, hidden=32, vocabulary=100)
        return seq2seq_example(length=int(size))
    if kind == "resnet" and size.isdecimal():
        return _tiny_images(min(int(size), _MOST_QUICK_BLOCKS)) if quick else network(int(size), 1)
    if name not in MODELS:
        raise ValueError(f"unknown network {name!r}; there are resnet-DEPTH, seq2seq-LENGTH, {', '.join(MODELS)}")
    return _tiny_images() if quick else MODELS[name]


def _tiny_images(num_blocks: int = 9) -> Example:
    build = functools.partial(ResNet, (1, 1, num_blocks, 1), num_classes=10, width=8)
    return image_example(build, _QUICK_BATCH_SIZE, side=64, num_classes=10)


@dataclass(slots=True, kw_only=True)
class _Trained:
    """What training some steps showed.

    Attributes:
        digest: Of all losses and of the parameters after them.
        step_seconds: Of the steps that count, those under a final plan.
        peak: Of the last step.
        figures: Of the report.
    """

    digest: str
    step_seconds: list[float]
    peak: Peak
    figures: dict[str, float] = field(default_factory=dict)


class _Training:
    """One network with its batch, to be trained from the same parameters again and again.

    Args:
        example: The network.
        device: Where it is trained.
        batch_size: Samples in the batch.
    """

    def __init__(self, example: Example, device: torch.device, batch_size: int) -> None:
        torch.manual_seed(0)
        self.device = device
        self._loss = example.loss
        model, inputs = example.build().train(), example.inputs(batch_size, torch.float32)
        self._initial = {key: value.clone() for key, value in model.state_dict().items()}
        self._model: nn.Module = model.to(device)
        self._inputs = tuple(tensor.to(device) for tensor in inputs)

    def train(self, budget: str | None = None, policy: str = "auto") -> _Trained:
        """Train some steps, plainly or within a budget.

        Raises:
            BudgetInfeasibleError: No plan of the policy is within the budget.
        """
        self._model.load_state_dict(self._initial)
        self._model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        memory = MemoryPlugin(budget, module=self._model, policy=policy) if budget is not None else None
        context: Callable[[], AbstractContextManager[object]] = nullcontext
        if memory is not None:
            context = functools.partial(memory.step, *self._inputs)
        losses: list[Tensor] = []
        with memory if memory is not None else nullcontext():
            seconds = [self._timed(optimizer, context, losses) for _ in range(_NUM_STEPS - 1)]
            momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
            beside = [*self._model.parameters(), *self._model.buffers(), *self._inputs, *momenta]
            peak = peak_within(self.device, beside, lambda: self._step(optimizer, context, losses))
            figures = _figures(memory) if memory is not None else {}
        return _Trained(
            digest=self._digest(losses), step_seconds=seconds[-_NUM_TIMED:], peak=peak, figures=figures
        )  # fmt: skip

    def _timed(
        self,
        optimizer: torch.optim.Optimizer,
        context: Callable[[], AbstractContextManager[object]],
        losses: list[Tensor],
    ) -> float:
        synchronize()
        start = time.perf_counter()
        self._step(optimizer, context, losses)
        synchronize()
        return time.perf_counter() - start

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        context: Callable[[], AbstractContextManager[object]],
        losses: list[Tensor],
    ) -> None:
        with context():
            loss = self._loss(self._model, self._inputs)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _digest(self, losses: Sequence[Tensor]) -> str:
        hasher = hashlib.sha256()
        for tensor in (*losses, *self._model.state_dict().values()):
            hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()


def within_cap(
    device: torch.device,
    *,
    quick: bool,
    title: str,
    network: str,
    batch_size: int,
    policies: Sequence[str],
    cap_bytes: int | None = None,
    cap_share: float | None = None,
) -> Measurements:
    """Train plainly on the whole device, then within a cap: plainly and by policies.

    Args:
        device: Where.
        quick: Whether a tiny network will do, in a cap that is tight for it.
        title: What it is called in rows.
        network: Name of the network.
        batch_size: Samples in the batch.
        policies: Who plans, one after the other.
        cap_bytes: What the process may reserve on the device beside its context.
        cap_share: The same as a share of plain training's own peak, in place of it.
    """
    _hold_to_same_bits()
    training = _Training(example_of(network, quick=quick), device, _QUICK_BATCH_SIZE if quick else batch_size)
    rows: list[Row] = []
    notes: dict[str, str] = {}
    spread: dict[str, dict[str, list[float]]] = {}

    def tried(way: str, run: Callable[[], _Trained]) -> _Trained | None:
        name = f"{title}, {way}"
        try:
            found = run()
        except Exception as error:
            if not (isinstance(error, BudgetInfeasibleError) or is_out_of_memory(error)):
                raise
            notes[name] = f"does not fit: {error}"[:300]
            rows.append(Row(case=name, metric="fits", value=0))
            error.__traceback__ = None
            free_memory(device)
            return None
        spread[name] = {"step_seconds": statistics.quantiles(found.step_seconds, n=4)}
        figures: dict[str, float | None] = {
            "fits": 1, "step_seconds": statistics.median(found.step_seconds), "peak_bytes": found.peak.allocated_bytes,
            "reserved_bytes": found.peak.reserved_bytes, **found.figures,
        }  # fmt: skip
        if plain is not None:
            figures["ratio"] = statistics.median(found.step_seconds) / statistics.median(plain.step_seconds)
            figures["same_bits"] = float(found.digest == plain.digest)
        rows.extend(Row(case=name, metric=key, value=value) for key, value in figures.items() if value is not None)
        free_memory(device)
        return found

    plain: _Trained | None = None
    plain = tried("plain, the whole device", training.train)
    if quick and plain is not None:
        cap_bytes, cap_share = round(_QUICK_SHARE * plain.peak.allocated_bytes), None
    if cap_share is not None:
        if plain is None:
            raise RuntimeError("a cap that is a share of plain training's peak needs that, and it does not fit")
        cap_bytes = round(cap_share * plain.peak.allocated_bytes)
    if cap_bytes is None:
        raise ValueError("neither cap_bytes nor cap_share is given")
    _cap(device, cap_bytes)
    title = f"{title}, {format_bytes(cap_bytes)}"
    tried(PLAIN, functools.partial(_below, training.train, device, cap_bytes))
    for policy in policies:
        budget = f"{round((1 - MARGIN) * cap_bytes)}B"
        tried(policy, functools.partial(training.train, budget, policy))
    config = {
        "network": network, "batch_size": batch_size, "cap_bytes": cap_bytes, "optimizer": "SGD with momentum",
        "algorithms": "deterministic", "allocator": "expandable segments",
    }  # fmt: skip
    return Measurements(rows=rows, config=config, repeats=_NUM_TIMED, spread=spread, notes=notes)


def depth(
    device: torch.device, *, quick: bool, cap_bytes: int, batch_size: int, is_managed: bool, depth: int
) -> dict[str, Any]:
    """Try one depth of a residual network within a cap; returns what :func:`benchmarks.gpu.max_batch.trial` does."""
    _hold_to_same_bits()
    _cap(device, cap_bytes)
    need_bytes: int | None = None
    budget = f"{round((1 - MARGIN) * cap_bytes)}B" if is_managed else None
    try:
        example = _tiny_images(depth) if quick else example_of(f"resnet-{depth}", quick=False)
        training = _Training(example, device, _QUICK_BATCH_SIZE if quick else batch_size)
        found = _below(functools.partial(training.train, budget), device, cap_bytes)
        need_bytes = int(found.figures.get("floor_bytes", found.peak.allocated_bytes))
    except Exception as error:
        return refusal(error, need_bytes)
    seconds = statistics.median(found.step_seconds)
    figures = {"step_seconds": seconds, "peak_bytes": found.peak.allocated_bytes, **found.figures}
    return {"fits": True, "need_bytes": need_bytes, "figures": figures, "config": {"batch_size": batch_size}}


def _below(run: Callable[[], _Trained], device: torch.device, cap_bytes: int) -> _Trained:
    found = run()
    if device.type != "cuda" and found.peak.allocated_bytes > cap_bytes:
        raise torch.OutOfMemoryError(f"its peak is {found.peak.allocated_bytes}")
    return found


def _cap(device: torch.device, cap_bytes: int) -> None:
    free_memory(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), device)


def _hold_to_same_bits() -> None:
    without_tf32()
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def _figures(memory: MemoryPlugin) -> dict[str, float]:
    report = memory.report()
    found: Mapping[str, Any] = {
        "budget_bytes": report.budget_bytes,
        "floor_bytes": report.floor_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "predicted_step_seconds": report.predicted_step_seconds,
        "predicted_plain_step_seconds": report.plain_step_seconds,
        "swapped_bytes": report.swapped_bytes,
        "recomputed_bytes": report.recomputed_bytes,
        "planning_seconds": report.planning_seconds,
        "is_planned": float(report.phase == "planned"),
    }
    return {name: value for name, value in found.items() if value is not None}
