"""Several forwards before one backward: one step, whoever calls them, with plain's bits and within the budget."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.forwards import Forwards, together
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from lightning_offload.plugins.shape_families import StepShape, shape_of
from tests import shares

NUM_STEPS = 10

Loop = Callable[[nn.Module, nn.Module, random.Random], None]


def pairs(model: nn.Module, _: nn.Module, rng: random.Random) -> None:
    """Anchor and positive."""
    a, b = model(torch.randn(64, 32)), model(torch.randn(64, 32))
    (a - b).square().mean().backward()


def pairs_of_lengths(model: nn.Module, _: nn.Module, rng: random.Random) -> None:
    """Each as long as it happens to be."""
    a, b = model(torch.randn(8 * rng.randint(4, 8), 32)), model(torch.randn(8 * rng.randint(4, 8), 32))
    (a.square().mean() - b.mean()).square().backward()


def one_or_two(model: nn.Module, _: nn.Module, rng: random.Random) -> None:
    """A second view of some batches."""
    loss = model(torch.randn(64, 32)).square().mean()
    if rng.random() < 0.5:
        loss = loss + model(torch.randn(64, 32)).sin().mean()
    loss.backward()


def thrown_away(model: nn.Module, _: nn.Module, rng: random.Random) -> None:
    """A forward whose outputs nobody keeps comes before."""
    model(torch.randn(64, 32))
    model(torch.randn(64, 32)).square().mean().backward()


def adversarial(generator: nn.Module, critic: nn.Module, rng: random.Random) -> None:
    """The generator's graph is kept through the critic's backward."""
    fake = generator(torch.randn(64, 32))
    (critic(torch.randn(64, 32)).square().mean() + critic(fake.detach()).sin().mean()).backward()
    critic(fake).cos().mean().backward()


def distilled(model: nn.Module, teacher: nn.Module, rng: random.Random) -> None:
    """The teacher goes without gradients."""
    x = torch.randn(64, 32)
    with torch.no_grad():
        goal = teacher(x)
    (model(x) - goal).square().mean().backward()


LOOPS = [pairs, pairs_of_lengths, one_or_two, thrown_away, adversarial, distilled]


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Dropout(0.2), nn.GELU())]
    return nn.Sequential(*layers)


def _train(loop: Loop, memory: ModuleMemoryPlugin | None) -> tuple[list[bytes], list[str]]:
    one, other, rng, phases = _net(1), _net(2), random.Random(0), []
    optimizer = torch.optim.Adam([*one.parameters(), *other.parameters()], 1e-2)
    if memory is not None:
        memory.follow(one, other)
    torch.manual_seed(3)
    for _ in range(NUM_STEPS):
        loop(one, other, rng)
        optimizer.step()
        optimizer.zero_grad()
        if memory is not None:
            phases.append(memory.phase)
    return [tensor.numpy().tobytes() for tensor in (*one.state_dict().values(), *other.state_dict().values())], phases


@pytest.mark.parametrize(
    ("loop", "policy"), shares.pairs(LOOPS, ["auto", "all-swap", "all-recompute", "keep-all"], every=2)
)
def test_same_bits(loop: Loop, policy: str) -> None:
    """As without the plugin, whatever the plan."""
    expected, _ = _train(loop, None)
    memory = ModuleMemoryPlugin("64MiB", policy=policy)
    try:
        trained, _ = _train(loop, memory)
    finally:
        memory.detach()
    assert trained == expected


@pytest.mark.parametrize(
    ("loop", "height"),
    # What the generator's forward saved lies beside the critic's second step, as much as the plan of the first leaves.
    [
        (pairs, 0.0),
        (pairs, 0.5),
        (pairs, 1.0),
        (distilled, 0.0),
        (distilled, 0.5),
        (adversarial, 0.3),
        (adversarial, 1),
    ],
)
def test_budgets_are_for_all_forwards_together(loop: Loop, height: float) -> None:
    """From the floor to the plain peak none is refused, and measured peaks are within it."""
    expected, _ = _train(loop, None)
    with contextlib.closing(_Detaching(ModuleMemoryPlugin("64MiB", policy="all-swap"))) as there:
        _train(loop, there.memory)
        report = there.memory.report()
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    budget = int(report.floor_bytes + height * (report.plain_peak_bytes - report.floor_bytes))
    with contextlib.closing(_Detaching(ModuleMemoryPlugin(f"{budget}B"))) as there:
        trained, phases = _train(loop, there.memory)
        report = there.memory.report()
    assert trained == expected
    assert phases[-1] == "planned"
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= budget


class _Detaching:
    def __init__(self, memory: ModuleMemoryPlugin) -> None:
        self.memory = memory

    def close(self) -> None:
        self.memory.detach()


def test_steps_are_counted_with_all_their_forwards() -> None:
    """Two forwards, one step; of a kind of its own."""
    memory = ModuleMemoryPlugin("64MiB")
    try:
        _, phases = _train(pairs, memory)
        assert memory.report().num_steps == NUM_STEPS
    finally:
        memory.detach()
    assert phases == ["recording", "verifying", "measuring"] + ["planned"] * (NUM_STEPS - 3)


def test_forwards_that_wait_are_told_of() -> None:
    """A budget that cannot be kept since earlier forwards wait for their backward: the error says what to do."""
    model, held = _net(1), []
    memory = ModuleMemoryPlugin("300000B", policy="keep-all", device="cpu")
    try:
        memory.follow(model)

        def train() -> None:
            for _ in range(8):
                out = model(torch.randn(64, 32))
                held.append(out)
                out.square().mean().backward(retain_graph=True)
                model.zero_grad()

        with pytest.raises(BudgetInfeasibleError) as caught:
            train()
    finally:
        memory.detach()
    assert "beside the step" in str(caught.value)


@pytest.mark.parametrize("policy", ["auto", "all-swap"])
def test_a_step_after_one_that_failed_begins_anew(policy: str) -> None:
    """A forward that raises, between two of one step, leaves nothing that the next would go on with."""
    model, memory = _net(1), ModuleMemoryPlugin("64MiB", policy=policy)
    try:
        memory.follow(model)
        for step in range(9):
            first = model(torch.randn(64, 32))
            if step in (3, 6):
                with pytest.raises(RuntimeError):
                    model(torch.randn(64, 31))
                continue
            (first - model(torch.randn(64, 32))).square().mean().backward()
            model.zero_grad()
            assert memory.phase in ("recording", "verifying", "measuring", "planned")
        num_steps = memory.report().num_steps
    finally:
        memory.detach()
    assert num_steps == 9


# ---- what a step is taken to be


def _shape(*sizes: int) -> StepShape:
    return shape_of((torch.empty(sizes),))


def _run(forwards: Forwards, *chain: StepShape) -> tuple[StepShape, tuple[StepShape, bool] | None]:
    taken = forwards.begin(chain[0])
    for shape in chain[1:]:
        forwards.go_on(shape)
    return taken, forwards.end()


def test_one_forward_is_known_by_itself() -> None:
    """As it was before there were several."""
    shape = _shape(4, 3)
    assert together((shape,)) is shape
    assert _run(Forwards(), shape) == (shape, None)


def test_a_step_is_taken_to_be_as_the_last() -> None:
    """And is told of where it is another one."""
    forwards, one, other = Forwards(), _shape(4, 3), _shape(5, 3)
    both = together((one, other))
    assert _run(forwards, one, other) == (one, (both, False))
    assert _run(forwards, one, other) == (both, None)
    assert _run(forwards, one) == (both, (one, True))
    assert _run(forwards, one) == (both, (one, True))  # they may come in turns
    assert _run(forwards, one) == (one, None)
    assert both.shapes == ((4, 3), (5, 3))


def test_sizes_of_later_forwards_are_foreseen() -> None:
    """Those that were the first one's are so again; others are the most that they were."""
    forwards = Forwards()
    for n, m in ((4, 9), (5, 7)):
        _run(forwards, _shape(n, 3), _shape(n, m))
    assert forwards.begin(_shape(8, 3)).shapes == ((8, 3), (8, 9))


def test_a_step_with_one_more_leaves_the_others_their_plan() -> None:
    """Of those after it two are taken to have one more as well, and are recorded; then the plan is there as it was."""
    torch.manual_seed(1)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    memory = ModuleMemoryPlugin("64MiB", policy="all-swap")
    memory.follow(model)
    phases = []
    for step in range(36):
        loss = model(torch.randn(32, 64)).square().mean()
        if step % 12 == 11:
            loss = loss + model(torch.randn(32, 64)).sin().mean()
        loss.backward()
        model.zero_grad()
        phases.append(memory.phase)
    memory.detach()
    for step in range(8, 36):
        assert phases[step] == ("recording" if step % 12 in (0, 1) else "planned"), (step, phases)
