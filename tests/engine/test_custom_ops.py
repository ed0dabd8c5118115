"""Training through ops of an extension: bit for bit as plainly, recomputed where they keep to their schemas."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.errors import PlanError
from lightning_offload.tensors import custom_ops
from lightning_offload.tensors.op_facts import facts_of
from tests.engine.live_tracker import LiveStorageTracker
from tests.engine.recomputable import nothing_known as nothing_known
from tests.engine.recomputable import recomputable_share
from tests.extension_ops import HONEST, LIARS, LIES_FROM, ByAddress, ByKernel, forget_cache, ops

WIDTH, ROWS = 24, 32
STEPS = 8
SILENT_LIARS = [name for name in LIARS if name != "counts"]
"""Where one that counts its writes in version counters has written what was saved, plain training raises."""
BY_ADDRESS = "by address"
RECOMPUTABLE = {HONEST: 0.95, "registered": 0.95, "by_triton": 0.95, "into": 0.5}
"""Which part may be recomputed of what is saved at least.

What lies on memory from `empty` cannot be made again: nobody says that an op that writes it reads none of it.
"""
Bits = list[list[bytes]]


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    """Nor do the ops remember anything."""
    yield
    forget_cache()


class Net(nn.Module):
    """A chain of linear layers, each with an op of the extension behind it, or none."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in names)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in names)

    def forward(self, x: Tensor) -> Tensor:
        """Every other layer beside a residual."""
        for number, (name, layer, scale) in enumerate(zip(self.names, self.layers, self.scales, strict=True)):
            inner = torch.tanh(layer(x))
            by = ByAddress if name == BY_ADDRESS else ByKernel
            y = by.apply(inner, scale, name) if name else torch.nn.functional.gelu(inner)  # type: ignore[no-untyped-call]
            x = y + x if number % 2 else y
        return x


def trained(names: tuple[str, ...], memory: MemoryPlugin | None = None) -> Bits:
    """Losses, gradients and parameters of some steps, as bytes."""
    gc.collect()  # what other trainings left counts beside these
    forget_cache()
    torch.manual_seed(3)
    net = Net(names)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: Bits = []
    if memory is not None:
        memory.attach(net)
    try:
        for number in range(STEPS):
            torch.manual_seed(100 + number)
            x = torch.randn(ROWS, WIDTH)
            if memory is None:
                loss = net(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                with memory.step(x):
                    loss = net(x).square().mean()
                    loss.backward()  # type: ignore[no-untyped-call]
            tensors = [loss, *(p.grad for p in net.parameters() if p.grad is not None), *net.parameters()]
            found.append([tensor.detach().numpy().tobytes() for tensor in tensors])
            optimizer.step()
            optimizer.zero_grad()
            del tensors, loss, x  # nothing is held into the next step
    finally:
        if memory is not None:
            memory.detach()
    return found


def plugin(policy: str, budget_bytes: int | None = None) -> MemoryPlugin:
    """One for a policy."""
    return MemoryPlugin(budget=f"{budget_bytes}B" if budget_bytes is not None else None, policy=policy)


@pytest.mark.parametrize("name", RECOMPUTABLE)
def test_honest_ops_are_recomputed(name: str) -> None:
    """One step more is recorded: in the first one nobody knew what they do."""
    names = (name,) * 4
    expected = trained(names)
    memory = plugin("all-recompute")
    assert trained(names, memory) == expected
    report = memory.report()
    assert report.phase == "planned"
    assert report.num_mismatched == 0
    assert recomputable_share(memory) >= RECOMPUTABLE[name]
    assert trained(names, plugin("all-swap")) == expected
    floor_bytes = report.floor_bytes
    assert floor_bytes is not None
    within = plugin("auto", floor_bytes + floor_bytes // 10)
    assert trained(names, within) == expected
    measured = within.report().measured_peak_bytes
    assert measured is not None
    assert measured <= floor_bytes + floor_bytes // 10


@pytest.mark.parametrize("policy", ["all-recompute", "all-swap"])
def test_what_kernels_are_given_by_address_is_as_plainly(policy: str) -> None:
    """They may write it, so in backward it counts as written, and it stays."""
    names = (BY_ADDRESS, HONEST, BY_ADDRESS)
    assert trained(names, plugin(policy)) == trained(names)


@pytest.mark.parametrize("policy", ["all-recompute", "all-swap"])
@pytest.mark.parametrize("name", [*SILENT_LIARS, "noisy"])
def test_liars_do_what_they_do_plainly(name: str, policy: str) -> None:
    """What they write past their schemas is what backward reads, as without the plugin."""
    names = (HONEST, name, "", name)
    expected = trained(names)
    memory = plugin(policy)
    assert trained(names, memory) == expected
    assert not facts_of(getattr(ops, name).default).replayable
    assert facts_of(ops.gelu.default).replayable
    told = dict(memory.report().distrusted_ops)
    assert told.keys() == {f"offload_tests.{name}.default"}
    assert told[f"offload_tests.{name}.default"].startswith(LIARS.get(name, "it draws random numbers"))


@pytest.mark.parametrize("seed", range(6))
def test_same_bits_at_random(seed: int) -> None:
    """Whatever ops follow on each other."""
    dice = random.Random(seed)
    choices = [*RECOMPUTABLE, BY_ADDRESS, "", "noisy", *SILENT_LIARS]
    names = [dice.choice(choices) for _ in range(dice.randint(2, 6))]
    while names.count("cached") > 1:  # plain training would raise
        names.remove("cached")
    expected = trained(tuple(names))
    for policy in ("all-recompute", "all-swap"):
        custom_ops.forget()
        assert trained(tuple(names), plugin(policy)) == expected, names


def test_an_op_that_lies_in_a_later_recording_is_not_believed_any_more() -> None:
    """The step is recorded once more, and bits are as plainly from then on, as before."""
    names = ("lies_later", "", "lies_later")
    trained(names, plugin("all-recompute"))
    assert facts_of(ops.lies_later.default).replayable
    memory = plugin("all-recompute")
    forget_cache()
    torch.manual_seed(3)
    net = Net(names)
    memory.attach(net)
    try:
        phases = []
        for number in range(5):
            if number == 0:
                LIES_FROM[0] = 0
            with memory.step():
                net(torch.randn(ROWS, WIDTH)).sum().backward()  # type: ignore[no-untyped-call]
            phases.append(memory.report().phase)
    finally:
        memory.detach()
    assert phases[:3] == ["recording", "recording", "verifying"]
    assert not facts_of(ops.lies_later.default).replayable
    assert list(dict(memory.report().distrusted_ops)) == ["offload_tests.lies_later.default"]


def test_kinds_of_step_that_counted_on_an_op_are_recorded_again() -> None:
    """Another kind of step showed that it does not keep to its schema."""
    memory = plugin("all-recompute")
    torch.manual_seed(3)
    net = Net(("lies_later", "", HONEST))
    memory.attach(net)
    try:
        for _ in range(6):
            with memory.step():
                net(torch.randn(ROWS, WIDTH)).sum().backward()  # type: ignore[no-untyped-call]
        assert memory.report().phase == "planned"
        custom_ops.learn(
            {
                custom_ops.identity_of(ops.lies_later.default): custom_ops.Standing(
                    keeps_to_writes=False, may_replay=False, why="seen elsewhere"
                )
            }
        )
        with memory.step():
            net(torch.randn(ROWS, WIDTH)).sum().backward()  # type: ignore[no-untyped-call]
        assert memory.report().phase == "recording"
    finally:
        memory.detach()


def test_restored_plans_know_what_was_seen() -> None:
    """A run that goes on in another process records no step for them."""
    names = (HONEST,) * 3
    first = plugin("all-recompute")
    expected = trained(names)
    trained(names, first)
    state = first.state_dict()
    custom_ops.forget()
    second = plugin("all-recompute")
    second.load_state_dict(state)
    assert trained(names, second) == expected
    assert second.report().recomputed_bytes == first.report().recomputed_bytes > 0
    with pytest.raises(PlanError, match="custom ops is malformed"):
        plugin("all-recompute").load_state_dict({**state, "custom_ops": [{"op": 3}]})


@torch.library.custom_op("offload_tests::filled", mutates_args=())
def _filled(x: Tensor) -> Tensor:
    """Its kernel writes what it returns in place, which the version counter of that tells of."""
    out = torch.empty_like(x)
    out.copy_(x)
    out.mul_(2.0).tanh_()
    return out


_filled.register_autograd(
    lambda ctx, gradient: gradient * 2 * (1 - ctx.saved_tensors[0] ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def _one_hot(x: Tensor) -> Tensor:
    return x * nn.functional.one_hot(x.argmax(-1), x.shape[-1]).float()


def _drawn(x: Tensor) -> Tensor:
    return x.sin() * torch.ops.aten.randn.default(list(x.shape))


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("function", [_filled, _one_hot, _drawn], ids=["filled", "one_hot", "drawn"])
def test_what_kernels_write_in_place_is_let_go_of(
    function: Callable[[Tensor], Tensor], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step after step: a result that has a version of its own from the beginning is recomputed as any other."""
    if engine == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    held = []
    with MemoryPlugin(policy="all-recompute", device="cpu") as memory:
        for _ in range(10):
            x, tracker = torch.randn(256, 64), LiveStorageTracker()
            tracker.register_all()
            before = tracker.live_bytes
            with tracker, memory.step(x):
                y = x
                for layer in layers:
                    y = y + function(layer(y))
                loss = y.square().mean()
                held.append(tracker.live_bytes - before)
                loss.backward()
            del y, loss
    assert held[-1] <= held[4] <= 6 * x.nbytes
