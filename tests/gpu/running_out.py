"""A training run in which the device runs out of memory under a plan: `python -m tests.gpu.running_out KIND DEVICE`.

KIND is "run", where the plugin is given the step as a function and may repeat it, or "step", where the loop does
that itself. Plain training comes first; then the same training under a budget, in the middle of which the process
is capped to a little less than the last step took, again after each step until one runs out: plans may change
between steps. What happened goes to standard output as one line of JSON. On a CPU, which has no such cap, a module
pretends: enough to try this script.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.memory import free_memory
from examples.demo.tracker import CudaPeak
from lightning_offload import MemoryPlugin
from lightning_offload.accelerators import indexed
from tests.gpu.device import IS_EMULATED
from tests.gpu.large import DeepMlp

_NUM_STEPS = 12
_CAPPED_STEP = 6
_CAP = 0.96
"""Of the peak of the step before; the plugin plans for 0.9 of it after running out."""
_BUDGET = 0.7
_MAX_TRIES = 4


@dataclass(slots=True, kw_only=True)
class _Run:
    """One training run."""

    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    is_intact: bool = True
    num_run_out: int = 0
    peak_bytes: int = 0

    def batch(self, index: int) -> Tensor:
        rows, width, _ = _sizes(self.device)
        return torch.randn(rows, width, generator=torch.Generator().manual_seed(index)).to(self.device)

    def forward_backward(self, batch: Tensor) -> Tensor:
        try:
            loss: Tensor = self.model(batch).square().mean()
            loss.backward()
        except torch.OutOfMemoryError:
            self.num_run_out += 1
            raise
        return loss.detach()

    def update(self, loss: Tensor) -> None:
        self.losses.append(loss.cpu().numpy().tobytes().hex())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> str:
        """Parameters, buffers and gradients, as a digest."""
        digest = hashlib.sha256()
        weights = list(self.model.parameters())
        for tensor in [*weights, *self.model.buffers(), *(weight.grad for weight in weights)]:
            digest.update(b"none" if tensor is None else tensor.detach().cpu().numpy().tobytes())
        return digest.hexdigest()


def main(kind: str, device: torch.device) -> dict[str, Any]:
    """Train plainly and under a budget."""
    plain = _new(device)
    plain_peak = 0
    for index in range(_NUM_STEPS):
        batch = plain.batch(index)
        loss = _metered(plain, functools.partial(plain.forward_backward, batch))
        plain_peak = max(plain_peak, plain.peak_bytes)
        plain.update(loss)
    expected, expected_state = plain.losses, plain.state()
    del plain, batch, loss
    free_memory(device)
    found = _new(device)
    budget = f"{int(_BUDGET * plain_peak)}B" if device.type == "cuda" else None
    with MemoryPlugin(budget, policy="auto" if device.type == "cuda" else "all-swap", module=found.model) as memory:
        for index in range(_NUM_STEPS):
            if index >= _CAPPED_STEP and not found.num_run_out:
                _cap(device, found)
            batch = found.batch(index)
            found.update(_metered(found, functools.partial(_step, kind, memory, found, batch)))
        report = memory.report()
    return {
        "is_same": found.losses == expected and found.state() == expected_state,
        "is_intact": found.is_intact,
        "messages": found.messages,
        "num_run_out": found.num_run_out,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "phase": report.phase,
    }


def _sizes(device: torch.device) -> tuple[int, int, int]:
    """Rows of a batch, width and depth of the model."""
    if device.type != "cuda":
        return 256, 64, 6
    return (2048, 256, 24) if IS_EMULATED else (16384, 1024, 24)


def _new(device: torch.device) -> _Run:
    torch.manual_seed(3)
    _, width, depth = _sizes(device)
    model = DeepMlp(width, depth).to(device)
    return _Run(device=device, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def _metered(run: _Run, step: Callable[[], Tensor]) -> Tensor:
    """A step's loss; what it had allocated at most is kept, on a GPU."""
    if run.device.type != "cuda":
        return step()
    with CudaPeak(run.device) as meter:
        loss = step()
    run.peak_bytes = meter.peak_bytes
    return loss


def _cap(device: torch.device, run: _Run) -> None:
    """From here on there is a little less memory than the last step took."""
    if device.type != "cuda":
        _pretend(run.model)
        return
    free_memory(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(_CAP * run.peak_bytes / total, device)


def _pretend(model: nn.Module) -> None:
    """Let the next forward run out of memory."""

    def fail(module: nn.Module, args: Any) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("CUDA out of memory. Not really.")

    assert isinstance(model, DeepMlp)
    handle = model.layers[3].register_forward_pre_hook(fail)


def _step(kind: str, memory: MemoryPlugin, run: _Run, batch: Tensor) -> Tensor:
    if kind == "run":
        return memory.run(lambda: run.forward_backward(batch), batch)
    for _ in range(_MAX_TRIES):
        # A loop that repeats a step has to put back itself what forward changed: here the buffer.
        buffers = [buffer.clone() for buffer in run.model.buffers()]
        before = [weight.detach().clone() for weight in run.model.parameters()]
        try:
            with memory.step(batch):
                return run.forward_backward(batch)
        except torch.OutOfMemoryError as error:
            run.messages.append(str(error))
        now = run.model.parameters()
        run.is_intact &= all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        run.optimizer.zero_grad()
        for buffer, saved in zip(run.model.buffers(), buffers, strict=True):
            buffer.copy_(saved)
    raise RuntimeError(f"no step of {_MAX_TRIES} fitted: {run.messages}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], indexed(torch.device(sys.argv[2])))) + "\n")
