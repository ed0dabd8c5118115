"""What a steady step costs the host, in CPU time over a plain one's, where every op is tiny.

A net of 24 small transformer layers: some 1,800 ops in forward, 672 saved tensors. On a GPU such a step takes as long
as the host needs to launch it; what the runtime does comes on top, in the engine that the report names. Each case
trains two copies of the net in turns, a plain one and one under management, torch computing in one thread; the clock
is the process's CPU time, that of its copying threads included. Ratios are medians, so of steps that nobody watches.
`mean_ratio` is of all time that the first steps under a final plan take, those among them whose memory is counted.

Beside them stand torch's own checkpointing and offloading (which on a CPU copies nothing), what nothing that is told of
each saved tensor can be below, hooks that do nothing, and what nothing in Python can be below that sees each op too:
these hooks and a dispatch mode that does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from benchmarks import environment, workloads
from benchmarks.checkpoints import BlockCheckpoints
from benchmarks.pairs import Collector, time_pairs
from benchmarks.results import Measurements, Options
from benchmarks.workloads import Workload, plan_steps
from lightning_offload import MemoryPlugin

TITLE = "Host time of a steady step"

_CASES: dict[str, tuple[str, float, float | None]] = {
    "keep-all": ("keep-all", 1.0, 1.05),
    "auto, h = 0.8": ("auto", 0.8, None),
    "auto, h = 0.5": ("auto", 0.5, 1.3),
    "auto, h = 0.2": ("auto", 0.2, None),
    "all-swap": ("all-swap", 1.0, 2.2),
    "all-recompute": ("all-recompute", 1.0, 1.6),
}
"""By case: the policy, where the budget lies between the floor (0) and the plain peak (1), and the goal."""

_WHOLE = "all-recompute"  # the case whose mean is told: a step of it that is counted takes longest
_NUM_WHOLE, _NUM_WHOLE_QUICKLY = 300, 40  # steps
_NUM_WARMUP_STEPS = 4


def run(options: Options, progress: Progress) -> Measurements:
    """Measure all cases; see the module's description."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(options, progress)
    finally:
        torch.set_num_threads(num_threads)


def _measure(options: Options, progress: Progress) -> Measurements:
    device = environment.device()
    make = functools.partial(workloads.small_layers, device, quick=options.quick)
    rivals = _rivals(make, device)
    task = progress.add_task("host", total=(len(_CASES) + len(rivals)) * options.num_pairs)
    collector = Collector(num_pairs=options.num_pairs, progress=progress, task=task, clock=time.process_time)

    def compare(case: str, plain: Callable[[], None], step: Callable[[], None], goal: float | None) -> None:
        progress.update(task, description=case)
        for _ in range(_NUM_WARMUP_STEPS):
            plain()
            step()
        collector.time(case, plain, step, goal)

    for case, (policy, height, goal) in _CASES.items():
        plain, managed = make(), make()
        plain.step()  # what it leaves on the device is beside the managed steps, and counts in their budget
        budget = f"{managed.limits().budget(height)}B"
        with MemoryPlugin(budget, policy=policy, module=managed.model) as memory:
            step = functools.partial(managed.managed_step, memory)
            plan_steps(memory, step)
            mean = _mean_ratio(plain.step, step, quick=options.quick) if case == _WHOLE else None
            compare(case, plain.step, step, goal)
            report = memory.report()
        if mean is not None:
            collector.note(case, mean_ratio=mean)
        collector.note(case, swapped_bytes=report.swapped_bytes, recomputed_bytes=report.recomputed_bytes)
    for case, rival in rivals.items():
        compare(case, make().step, rival, None)
    config = {"small_layers": make().config}
    return Measurements(rows=collector.rows, config=config, repeats=options.num_pairs, spread=collector.spread)


def _mean_ratio(plain: Callable[[], None], step: Callable[[], None], *, quick: bool) -> float:
    """The time of many steps over that of as many plain ones, none left out."""
    num_steps = _NUM_WHOLE_QUICKLY if quick else _NUM_WHOLE
    times = time_pairs(plain, step, num_pairs=num_steps, clock=time.process_time)
    return sum(times.other_seconds) / sum(times.plain_seconds)


def _rivals(make: Callable[[], Workload], device: torch.device) -> dict[str, Callable[[], None]]:
    """By name: what else steps the net."""
    checkpointed, offloaded, hooked, watched = make(), make(), make(), make()
    checkpoints = BlockCheckpoints(list(checkpointed.model.children()))
    on_cpu = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=device.type == "cuda")
    idly = functools.partial(_doing_nothing, watched.model)
    return {
        "torch, checkpoint per layer": functools.partial(checkpointed.step, checkpoints.on),
        "torch, save_on_cpu": functools.partial(offloaded.step, on_cpu),
        "hooks that do nothing": functools.partial(hooked.step, _hooks_doing_nothing),
        "a mode and hooks that do nothing": functools.partial(watched.step, idly),
    }


class _IdleMode(TorchDispatchMode):
    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _doing_nothing(model: nn.Module) -> Iterator[None]:
    """Hooks around all, and a mode around forward."""

    def enter_mode(*_: object) -> None:
        mode.enter_context(_IdleMode())

    with contextlib.ExitStack() as mode, torch.autograd.graph.saved_tensors_hooks(_same, _same):
        enter = model.register_forward_pre_hook(enter_mode)
        leave = model.register_forward_hook(lambda *_: mode.close())
        try:
            yield
        finally:
            enter.remove()
            leave.remove()


def _hooks_doing_nothing() -> contextlib.AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor
