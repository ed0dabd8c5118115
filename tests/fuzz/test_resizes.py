"""Storages that a program resizes at random, in forward and in backward: every bit, and every byte that is counted.

Each place of a model has memory that comes and goes: made before the step or within it, by an op or out of sight, read
as a weight or saved as an activation. What it holds is filled in before it is read, past version counters, as sharded
parameters are. A count of live bytes that does not trust the library says what is there.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_offload import MemoryPlugin
from lightning_offload.runtime import native
from tests.engine.live_tracker import LiveStorageTracker
from tests.fuzz.running import random_planner
from tests.shares import pairs, share

SIDE = 64
ROWS = 96
NUM_STEPS = 9
FEW_BYTES = 256
ENGINES = ("native", "python")


class Counter(LiveStorageTracker):
    """Counts a resize as torch does it: what a storage has is copied to its new memory, and goes then."""

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Resize a storage."""
        self._read_sizes_again()
        self.live_bytes += num_bytes
        self._rise("resize")
        self.live_bytes -= num_bytes
        storage.resize_(num_bytes)
        self._read_sizes_again()


class Resizer:
    """Resizes storages, by a counter if there is one."""

    counter: Counter | None = None

    def __call__(self, tensor: Tensor, *factors: float) -> None:
        """Give a tensor's storage several sizes in turn, as multiples of what the tensor needs."""
        for factor in factors:
            storage, num_bytes = tensor.untyped_storage(), int(factor * tensor.nbytes)
            if self.counter is not None:
                self.counter.resize(storage, num_bytes)
            else:
                storage.resize_(num_bytes)

    def fill(self, tensor: Tensor, contents: Tensor, *factors: float) -> None:
        """Fill a tensor anew out of sight of autograd, on memory of several sizes in turn, large enough in the end."""
        self(tensor, *factors, *([] if factors and factors[-1] >= 1 else [1]))
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
            tensor.copy_(contents)


def sizes(rng: random.Random) -> list[float]:
    """Sizes in turn; none at all, often."""
    return [rng.choice([0, 0, 0.5, 1, 1.5, 2]) for _ in range(rng.choice([0, 1, 1, 2, 3]))]


def made_out_of_sight(like: Tensor) -> Tensor:
    """A tensor that no op has made."""
    storage = torch.UntypedStorage(like.nbytes)
    return torch.empty(0).set_(storage, 0, like.shape)  # type: ignore[call-overload, no-any-return]


class Passing(nn.Module):
    """Reads what was made out of sight and dies within the step: at once, or with what autograd has saved."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.is_saved = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        other = made_out_of_sight(x).fill_(0.5)
        return torch.tanh(x * other if self.is_saved else x + other)


class Weight(nn.Module):
    """A layer whose weight is on memory that comes and goes."""

    def __init__(self, rng: random.Random, resize: Resizer) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(SIDE, SIDE) / 8)
        self.resize = resize
        self.origin = rng.choice(["older", "older", "parameter", "made", "unseen"])
        self.is_read_again = rng.random() < 0.3
        self.before, self.between, self.after, self.in_backward, self.at_end = (sizes(rng) for _ in range(5))
        self.scale = rng.choice([1.0, 1.0, 0.5])  # what backward finds may be something else
        self.full: Tensor | None = None
        if self.origin == "older":
            self.full = self._made().requires_grad_()
        elif self.origin == "parameter":
            self.full = nn.Parameter(self._made())

    def _made(self) -> Tensor:
        return made_out_of_sight(self.shard) if self.origin == "unseen" else torch.empty_like(self.shard)

    def forward(self, x: Tensor) -> Tensor:
        if self.full is None:
            self.full = self._made().requires_grad_()
        full, resize = self.full, self.resize
        resize.fill(full, self.shard.detach(), *self.before)
        y = torch.sigmoid(x @ full.t())
        if self.is_read_again:
            resize.fill(full, self.shard.detach(), *self.between)
            y = y * (x @ full)
        resize(full, *self.after)
        contents = self.scale * self.shard.detach()
        y.register_hook(lambda _: resize.fill(full, contents, *self.in_backward))
        if self.is_read_again:
            x.register_hook(lambda _: resize(full, *self.at_end)) if x.requires_grad else None
        return y

    def reduce(self) -> None:
        """Hand the gradient over, and keep no memory but that of what is older than the next step."""
        full = self.full
        assert full is not None
        self.shard.grad, full.grad = full.grad, None
        self.resize(full, *self.at_end)
        if self.origin in ("made", "unseen"):
            self.full = None


class Activation(nn.Module):
    """What it saves comes and goes, and may hold something else when it is read."""

    def __init__(self, rng: random.Random, resize: Resizer) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE)
        self.resize = resize
        self.after, self.in_backward = sizes(rng), sizes(rng)
        self.is_from_here_on = 0 if rng.random() < 0.7 else rng.randrange(NUM_STEPS)
        self.index = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x))
        z = y * y.exp()
        if self.index >= self.is_from_here_on:
            contents = 0.5 * y.detach()
            self.resize(y, *self.after)
            z.register_hook(lambda _: self.resize.fill(y, contents, *self.in_backward))
        return z

    def reduce(self) -> None:
        """The step is over."""
        self.index += 1


class Model(nn.Module):
    """Places by dice, and layers that are as others between them."""

    def __init__(self, seed: int, resize: Resizer, *, is_steady: bool) -> None:
        super().__init__()
        rng = random.Random(f"resizes {seed}")
        makes: list[Callable[[], nn.Module]] = [
            lambda: Weight(rng, resize),
            lambda: Activation(rng, resize),
            lambda: Passing(rng),
            lambda: nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()),
        ]
        self.parts = nn.ModuleList(make() for make in rng.choices(makes, [3, 2, 1, 1], k=rng.randrange(3, 8)))
        self.parts.append(Weight(rng, resize))
        for part in self.parts:
            if is_steady and isinstance(part, Activation):
                part.is_from_here_on = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for part in self.parts:
            x = part(x)
        return x

    def reduce(self) -> None:
        """The step is over."""
        for part in self.parts:
            if isinstance(part, (Weight, Activation)):
                part.reduce()


def trained(seed: int, memory: MemoryPlugin | None, *, is_steady: bool) -> tuple[list[bytes], int]:
    """Losses and gradients of a training, and the peak of its last step by our own count."""
    torch.manual_seed(seed)
    resize = Resizer()
    model = Model(seed, resize, is_steady=is_steady)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    seen, peak_bytes = [], 0
    for step in range(NUM_STEPS):
        x = torch.randn(ROWS, SIDE, generator=torch.Generator().manual_seed(step))
        with contextlib.ExitStack() as stack:
            if step == NUM_STEPS - 1:
                gc.collect()
                resize.counter = Counter(has_resizes=True)
                resize.counter.register_all()
                stack.enter_context(resize.counter)
                window = stack.enter_context(resize.counter.window())
            if memory is not None:
                stack.enter_context(memory.step(x))
            loss = functional.mse_loss(model(x), x)
            loss.backward()
        if step == NUM_STEPS - 1:
            resize.counter, peak_bytes = None, window.peak_bytes
        model.reduce()
        seen += [loss.detach().numpy().tobytes(), *(p.grad.numpy().tobytes() for p in parameters if p.grad is not None)]
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return seen, peak_bytes


@pytest.fixture(params=ENGINES)
def forced_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run planned steps in one engine."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    if request.param == "native":
        monkeypatch.delenv("LIGHTNING_OFFLOAD_ENGINE")
        if native.load() is None:
            pytest.skip(f"no native core: {native.why_python()}")
    return str(request.param)


@pytest.mark.parametrize(("seed", "policy"), pairs(range(8), ["keep-all", "all-swap", "all-recompute"], every=3))
def test_counts_are_exact(seed: int, policy: str, forced_engine: str) -> None:
    """Prediction, the count of a measured step and ours agree, and every bit is plain PyTorch's."""
    plain, _ = trained(seed, None, is_steady=True)
    with MemoryPlugin(budget="1GiB" if policy == "keep-all" else None, policy=policy, device="cpu") as memory:
        found, peak_bytes = trained(seed, memory, is_steady=True)
        report = memory.report()
    assert found == plain
    assert report.phase == "planned"
    assert report.num_deviations == 0
    measured = report.measured_peak_bytes
    assert measured is not None
    assert abs(peak_bytes - measured) <= FEW_BYTES, (peak_bytes, measured)
    assert abs(report.predicted_peak_bytes - measured) <= FEW_BYTES, (report.predicted_peak_bytes, measured)


@pytest.mark.parametrize("seed", share(range(16), every=2))
def test_bits_under_any_plan(seed: int, forced_engine: str) -> None:
    """Under plans by dice, also where steps resize from some step on what the plan knows nothing of."""
    plain, _ = trained(seed, None, is_steady=False)
    is_quiet = seed % 3 == 0
    planned = mock.patch("lightning_offload.planning.planner.plan", random_planner(seed, is_quiet=is_quiet))
    with planned, MemoryPlugin(policy="all-swap", device="cpu") as memory:
        found, _ = trained(seed, memory, is_steady=False)
    assert found == plain
