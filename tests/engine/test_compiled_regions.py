"""What compiled regions save is planned, and comes back as they saved it, whatever they do out of sight."""

from __future__ import annotations

import gc
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_offload import BudgetInfeasibleError
from lightning_offload.plugins.report import Report
from tests.engine.short_training import train
from tests.hiding_compiler import hiding
from tests.shares import is_all, share

pytestmark = [  # the compiler's own, some of them raised by what it looks at while tracing
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

NUM_STEPS = 7
WIDTH, ROWS = 64, 1024
MOST_ABOVE = 1.02  # of the budget: what a region allocates within is seen by nobody

Net = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _Block(nn.Module):
    """A residual block, and what it does is drawn."""

    def __init__(self, rng: random.Random, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = rng.choice([torch.relu, torch.sin, torch.tanh, F.gelu])
        self.normalises, self.is_doubled = rng.random() < 0.5, rng.random() < 0.3
        self.p = rng.choice([0.0, 0.0, 0.2])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x) if self.normalises else x)
        hidden = self.act(hidden).exp().clamp(max=3.0)
        if self.is_doubled:
            hidden = hidden * hidden.sigmoid()
        return x + F.dropout(self.down(hidden), self.p)


class _Random(nn.Module):
    """Blocks, some of them compiled, and ops between them that read, save and overwrite what these give."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(f"regions {seed}")
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(_Block(rng) for _ in range(rng.randint(3, 5)))
        self.between = [rng.choice(("nothing", "in place", "product", "clone")) for _ in self.blocks]
        for block in self.blocks:
            if rng.random() < 0.75:
                block.compile(backend=hiding(rng.choice([0.3, 0.7, 1.0]), seed), fullgraph=rng.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block, between in zip(self.blocks, self.between, strict=True):
            before, x = x, block(x)
            if between == "in place":
                x = x.clone().mul_(0.5).relu_()
            elif between == "product":
                x = torch.tanh(x) * before
            elif between == "clone":
                x = x + torch.cos(before)
        return x


def _train(
    net: Net, policy: str | None = None, budget: int | None = None, **more: Any
) -> tuple[list[bytes], Report | None]:
    if not isinstance(net, _Compiled):
        torch._dynamo.reset()
    gc.collect()  # what was compiled before holds its model
    return train(net, (ROWS, WIDTH), policy, budget, num_steps=NUM_STEPS, **more)


class _Compiled:
    """A model that is compiled in the first of its trainings, and begins each of them with the same state."""

    def __init__(self, net: Net) -> None:
        torch._dynamo.reset()
        self._model = net()
        self._state = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    def __call__(self) -> nn.Module:
        self._model.load_state_dict(self._state)
        return self._model


@pytest.mark.parametrize("seed", share(range(8), every=4))
def test_random_regions(seed: int) -> None:
    """Swapped, recomputed, unverified or by a budget: the bits of the same compiled model."""
    rng = random.Random(f"ways {seed}")

    def net() -> nn.Module:
        return _Random(seed)

    expected, _ = _train(net)
    compiled = _Compiled(net)
    actual, report = _train(compiled, "all-swap")  # what is recorded is compiled at the time
    assert actual == expected
    assert report is not None
    assert report.swapped_bytes > 0
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    assert report.floor_bytes < 0.8 * report.plain_peak_bytes
    between = report.floor_bytes + rng.uniform(0.35, 0.85) * (report.plain_peak_bytes - report.floor_bytes)
    actual, _ = _train(compiled, "all-recompute", verify=rng.choice(["first", "never"]))
    assert actual == expected
    actual, report = _train(compiled, "auto", int(between), verify=rng.choice(["first", "never"]))
    assert actual == expected
    assert report is not None
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= MOST_ABOVE * int(between)


class _Blocks(nn.Module):
    def __init__(self, backend: str, *, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        rng = random.Random(1)
        self.blocks = nn.ModuleList(_Block(rng) for _ in range(3))
        for block in self.blocks if not whole else ():
            block.compile(backend=backend)
        if whole:
            self.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_budgets_are_met(backend: str) -> None:
    """Of blocks that are compiled most of what they save may leave, and budgets from near the floor on are met."""

    def net() -> nn.Module:
        return _Blocks(backend)

    expected, _ = _train(net)
    compiled = _Compiled(net)
    actual, report = _train(compiled, "all-swap")
    assert actual == expected
    assert report is not None
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    assert report.swapped_bytes > 0.8 * (report.swapped_bytes + report.kept_bytes)
    assert report.floor_bytes < 0.8 * report.plain_peak_bytes
    for height in share((0.35, 0.6, 0.85), 2):  # a first call may hold a tensor for longer: floors differ by run
        budget = int(report.floor_bytes + height * (report.plain_peak_bytes - report.floor_bytes))
        actual, planned = _train(compiled, "auto", budget)
        assert actual == expected
        assert planned is not None
        assert planned.measured_peak_bytes is not None
        assert planned.measured_peak_bytes <= MOST_ABOVE * budget
        assert planned.swapped_bytes + planned.recomputed_bytes > 0


OWN_BUDGETS = [(0.5, 0.1), (0.5, 0.0), *([(1.0, 0.1)] if is_all() else [])]
"""The last is what every other test here trains with, and tells nothing."""


@pytest.mark.parametrize(("kept", "p"), OWN_BUDGETS)
def test_the_compilers_own_budget(kept: float, p: float) -> None:
    """It draws other random numbers where it recomputes: that is told of where a step draws any; else all is exact."""

    def net() -> nn.Module:
        made = _Blocks("aot_eager")
        for block in made.blocks:
            block.p = p  # type: ignore[assignment]
        return made

    with torch._functorch.config.patch(activation_memory_budget=kept), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected, _ = _train(net)
        actual, _ = _train(net, "all-swap")
    told = [str(each.message) for each in caught if "activation_memory_budget" in str(each.message)]
    assert bool(told) == (kept < 1 and p > 0)
    if p == 0:
        assert actual == expected


def test_a_whole_model_is_one_region() -> None:
    """What it saves comes back all at once, so there is no gain: the error says so, and what to do."""

    def net() -> nn.Module:
        return _Blocks("aot_eager", whole=True)

    expected, _ = _train(net)
    actual, report = _train(net, "all-swap")
    assert actual == expected
    assert report is not None
    assert report.floor_bytes is not None
    with pytest.raises(BudgetInfeasibleError, match=r"is read back at once.*compile its blocks and not the whole"):
        _train(net, "auto", report.floor_bytes - (64 << 10))
