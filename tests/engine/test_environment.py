"""Settings of torch that differ between forward and backward change no bit, nor what a replay leaves out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.environment import environment_on
from tests.shares import is_all

SIDE = 64
NUM_STEPS = 6
HEIGHTS = [i / 10 for i in range(1, 10)] if is_all() else [0.1, 0.35, 0.6, 0.85]
"""From the floor (0) to the plain peak (1); at each of them something leaves the device."""


@contextlib.contextmanager
def _changed(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _determinism() -> Any:
    return torch.are_deterministic_algorithms_enabled()


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "default-dtype": lambda: _changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "threads": lambda: _changed(torch.get_num_threads, torch.set_num_threads, 2),
    "deterministic": lambda: _changed(_determinism, torch.use_deterministic_algorithms, True),
    "mkldnn": lambda: _changed(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "precision": lambda: _changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "denormals": lambda: _changed(lambda: False, torch.set_flush_denormal, True),
    "no-grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "random-state": torch.random.fork_rng,
}


class Net(nn.Module):
    """A part of forward runs under another setting than the rest and than backward."""

    def __init__(self, setting: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        super().__init__()
        self.setting = setting
        self.linear = nn.Linear(SIDE, SIDE)
        self.last = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Draw, fill, divide and multiply under the setting; use it outside."""
        hidden = self.linear(x).tanh()
        with self.setting():
            noise = torch.randn(SIDE, SIDE) + torch.arange(SIDE) / torch.tensor(3)
            ratio = torch.ones(SIDE, dtype=torch.int64).cumsum(0) / 7
            tiny = hidden.detach() * 1e-38 * 1e-3
            product = (hidden.detach() @ hidden.detach().t()).softmax(1)
            inner = (self.last(hidden) * 1.5).sin() if torch.is_grad_enabled() else hidden
        scale = (noise.float().clone() + ratio.float().clone()).sigmoid()
        mixed = hidden * scale + inner.float() * product.float().clone() + hidden * (tiny.clone() * 1e38)
        return (mixed.tanh() * scale).sin()


def _train(net: nn.Module, memory: MemoryPlugin | None, setting: str | None) -> list[Any]:
    seen: list[Any] = []
    for index in range(NUM_STEPS):
        torch.manual_seed(index)
        x = torch.randn(SIDE, SIDE)
        with memory.step(x) if memory is not None else contextlib.nullcontext():
            with SETTINGS[setting]() if setting is not None else contextlib.nullcontext():
                loss = net(x).float().square().sum()
            loss.backward()
        seen.append(loss.item())
        seen.extend(p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None)
        seen.extend(b.clone().numpy().tobytes() for b in net.buffers())
        seen.append(torch.get_rng_state().numpy().tobytes())
        net.zero_grad()
    return seen


def _check(build: Callable[[], nn.Module], heights: list[float], setting: str | None = None) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return build()

    expected = _train(net(), None, setting)
    before = environment_on(torch.device("cpu"))
    for policy in ("all-recompute", "all-swap"):
        with MemoryPlugin(device="cpu", policy=policy) as memory:
            assert _train(net(), memory, setting) == expected, policy
            report = memory.report()
            assert report.num_mismatched == 0, policy
    assert before.now() is before
    low, high = report.floor_bytes, report.plain_peak_bytes
    for height in heights:
        assert low is not None
        assert high is not None
        with MemoryPlugin(budget=f"{int(low + height * (high - low))}B", device="cpu") as memory:
            assert _train(net(), memory, setting) == expected, height
            report = memory.report()
            assert report.swapped_bytes + report.recomputed_bytes > 0, height


@pytest.mark.parametrize("around_all", [False, True], ids=["part", "forward"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_of_forward_alone_is_exact(setting: str, around_all: bool) -> None:
    """What is recomputed in backward is computed under the settings of forward, which are then as they were."""
    if around_all and setting in ("no-grad", "inference"):
        pytest.skip("no gradient is left then")
    inner = contextlib.nullcontext if around_all else SETTINGS[setting]
    _check(lambda: Net(inner), [], setting if around_all else None)


class _Modes(nn.Module):
    """One batch norm in evaluation, training, evaluation and training mode within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.norm = nn.BatchNorm1d(SIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Change the mode between the calls."""
        x = self.first(x)
        for is_training in (False, True, False, True):
            self.norm.train(is_training)
            x = F.gelu(self.norm(x) * 1.5)
        return x


def test_batch_norm_in_both_modes_is_exact() -> None:
    """Statistics that one call updates and the next reads are never replayed wrong, whatever the budget."""
    _check(_Modes, HEIGHTS)
