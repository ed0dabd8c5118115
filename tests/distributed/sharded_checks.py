"""Trains with FSDP2 (`fully_shard`) on two processes under torchrun, plainly and within budgets; compares and counts.

Usage: torchrun --nproc-per-node=2 sharded_checks.py FOLDER

Each rank writes `done<rank>` at its end. What is alive is counted by a tracker that does not trust the library.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.runtime.native import build
from tests.engine.live_tracker import LiveStorageTracker
from tests.shares import is_all

WIDTH, NUM_BLOCKS, NUM_CLASSES, ROWS, NUM_STEPS = 64, 2, 1024, 192, 6
"""With so many classes the peak is at the loss."""
GLOO_SECONDS = 0.03
"""How long gloo's threads get before the peak, and after a step, to let go of what they have sent."""
FEW_BYTES = 256
IN_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RESHARDED: dict[str, Any] = {"reshard_after_forward": True}
Cases = list[tuple[dict[str, Any], tuple[str, ...]]]
CASES: Cases = [
    (RESHARDED, ("keep-all", "all-swap", "all-recompute", "auto")),
    ({"reshard_after_forward": False}, ("all-swap",)),
    ({**RESHARDED, "mp_policy": IN_HALF}, ("all-swap",)),
]
"""How models are sharded, and the policies that they train under."""
PARTS: dict[str, Cases] = {
    "native": CASES if is_all() else CASES[:1],
    "python": CASES if is_all() else [(RESHARDED, ("all-recompute",)), *CASES[1:]],
}
"""What is tried in each engine; in Python twice where there is no compiler."""


class Block(nn.Module):
    """A residual block with dropout, so that the numbers drawn matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(tensor: Tensor) -> bytes:
    """A tensor's own bytes, as no tensor."""
    return local(tensor.detach()).reshape(-1).view(torch.uint8).numpy().tobytes()


def sharded(mesh: DeviceMesh, case: dict[str, Any]) -> nn.Module:
    """A model whose blocks come and go."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, NUM_CLASSES))
    for block in model:
        fully_shard(block, mesh=mesh, **case)
    return fully_shard(model, mesh=mesh, **case)


def trained(mesh: DeviceMesh, memory: MemoryPlugin | None, case: dict[str, Any]) -> tuple[list[bytes], int]:
    """Losses, gradients, parameters and random state, and the peak of the last step by our own count."""
    model = sharded(mesh, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    seen, peak_bytes = [], 0
    for step in range(NUM_STEPS):
        torch.manual_seed(100 + 10 * step + dist.get_rank())
        x, classes = torch.randn(ROWS, WIDTH), torch.randint(0, NUM_CLASSES, (ROWS,))
        with contextlib.ExitStack() as stack:
            if step == NUM_STEPS - 1:
                tracker = LiveStorageTracker(has_resizes=True)
                tracker.register_all()
                stack.enter_context(tracker)
                window = stack.enter_context(tracker.window())
            if memory is not None:
                stack.enter_context(memory.step(x))
            logits = model(x)
            time.sleep(GLOO_SECONDS)
            loss = functional.cross_entropy(logits.float(), classes)
            del logits
            loss.backward()  # type: ignore[no-untyped-call]
        if step == NUM_STEPS - 1:
            peak_bytes = window.peak_bytes
        seen += [bits(loss), *(bits(p.grad) for p in model.parameters() if p.grad is not None)]
        del loss
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(GLOO_SECONDS)
    return [*seen, *map(bits, model.parameters()), bits(torch.get_rng_state())], peak_bytes


def check(mesh: DeviceMesh, case: dict[str, Any], policies: tuple[str, ...]) -> None:
    """Bit for bit as plain FSDP2; prediction, measurement and our own count agree; within the budget."""
    plain, plain_peak = trained(mesh, None, case)
    gc.collect()
    floor_bytes = keep_bytes = 0
    for policy in policies:
        budget = 1 << 30 if policy == "keep-all" else None  # without one its steps are not measured
        if policy == "auto":
            budget = _agreed(floor_bytes + (keep_bytes - floor_bytes) // 4)
        with MemoryPlugin(budget, policy=policy, device="cpu") as memory:
            found, peak_bytes = trained(mesh, memory, case)
            report = memory.report()
        told = f"{case}, {policy}, rank {dist.get_rank()}: counted {peak_bytes}, plain {plain_peak}, {report!r}"
        assert found == plain, told
        assert report.phase == "planned", told
        assert not report.num_deviations, told
        measured = report.measured_peak_bytes
        assert measured is not None
        assert abs(measured - peak_bytes) <= FEW_BYTES, told
        assert abs(measured - report.predicted_peak_bytes) <= FEW_BYTES, told
        if policy == "keep-all":
            assert abs(measured - plain_peak) <= FEW_BYTES, told
        else:
            assert report.swapped_bytes + report.recomputed_bytes > 0, told
        if policy == "auto":
            assert budget is not None
            assert measured <= budget < plain_peak, told
        floor_bytes, keep_bytes = report.floor_bytes or 0, report.plain_peak_bytes or 0
        gc.collect()


def _agreed(num_bytes: int) -> int:
    """The largest of the ranks' figures."""
    largest = torch.tensor([num_bytes])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def check_state(mesh: DeviceMesh) -> None:
    """Parameters, gradients and optimizer state count by what this rank has of them."""
    model = sharded(mesh, RESHARDED)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    state = PersistentState(lambda parameters: None)
    state.attach(model)
    try:
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        here = sum(local(p).nbytes for p in parameters)
        assert 0 < here < sum(p.nbytes for p in parameters)
        counters = 4 * len(parameters)
        assert sum(state.gradients().values()) == here
        assert state.optimizer_state_bytes == 2 * here + counters
        assert state.optimizer_peak_bytes == 4 * here + counters
        keys = {local(p).untyped_storage()._cdata for p in parameters}
        assert keys <= state.identities() <= set(state.storages(torch.device("cpu")))
    finally:
        state.detach()


def main() -> None:
    """Run the cases of a part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for engine, cases in PARTS.items():
            os.environ.pop("LIGHTNING_OFFLOAD_ENGINE", None)
            if engine == "python" or build.why_not():
                os.environ["LIGHTNING_OFFLOAD_ENGINE"] = "python"
            for case, policies in cases:
                check(mesh, case, policies)
        check_state(mesh)
        (Path(sys.argv[1]) / f"done{dist.get_rank()}").touch()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
