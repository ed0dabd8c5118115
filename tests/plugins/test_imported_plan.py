"""A plan that was made elsewhere: followed where it can be, and never at the cost of a gradient."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.errors import PlanError
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.files import sibling_graph
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import plan as make_plan
from lightning_offload.plugins.fake import record_fake_step
from lightning_offload.runtime.follow import LEFT, TINY_BYTES, BySize
from lightning_offload.runtime.program import compile_plan
from lightning_offload.runtime.routes import SizeRoute
from tests.graph.building import chain
from tests.runtime.executing import plan_of

ROWS, WIDTH = 64, 96
HERE = dataclasses.replace(device_spec("k40c"), name="here", kind="cpu", compute_capability=0)
Loss = Callable[[nn.Module, Tensor], Tensor]


def net(depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Linear layers with batch norm, GELU and dropout."""
    torch.manual_seed(1)
    layer = lambda: (nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2))  # noqa: E731
    return nn.Sequential(*(module for _ in range(depth) for module in layer()))


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    """What is captured."""
    return model(x).square().mean()


def captured(rows: int = ROWS, depth: int = 4) -> StepGraph:
    """A step of the net, recorded without running it."""

    def build() -> tuple[nn.Module, Callable[[], None]]:
        model, x = net(depth), torch.empty(rows, WIDTH)
        return model, lambda: plain_loss(model, x).backward()

    return record_fake_step(build, HERE)


def written(folder: Path, graph: StepGraph, policy: str = "auto", share: float = 0.3) -> Path:
    """A plan at a budget so far from the floor to the plain peak, with its step beside it."""
    roomy = make_plan(graph, HERE, None)
    budget = int(roomy.floor_bytes + share * (roomy.plain_peak_bytes - roomy.floor_bytes))
    made = make_plan(graph, HERE, budget, policy=policy)
    path = folder / "plan.json"
    path.write_text(made.to_json())
    sibling_graph(path).write_text(graph.to_json())
    return path


@dataclasses.dataclass(slots=True)
class Run:
    """What a training showed: the gradients of each step, and what the plugin did."""

    gradients: list[list[Tensor]] = dataclasses.field(default_factory=list)
    phases: list[str] = dataclasses.field(default_factory=list)


def train(model: nn.Module, batches: Sequence[Tensor], memory: MemoryPlugin | None, loss: Loss = plain_loss) -> Run:
    """Steps without an optimizer."""
    seen = Run()
    torch.manual_seed(2)
    for x in batches:
        model.zero_grad()
        with memory.step(x) if memory is not None else contextlib.nullcontext():
            loss(model, x).backward()  # type: ignore[no-untyped-call]
        seen.gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        if memory is not None:
            seen.phases.append(memory.phase)
    return seen


def compared(
    model: nn.Module, batches: Sequence[Tensor], loss: Loss = plain_loss, **keywords: object
) -> tuple[list[str], MemoryPlugin]:
    """Phases under a plugin, whose gradients are those of plain training bit for bit."""
    plain = train(copy.deepcopy(model), batches, None, loss)
    with MemoryPlugin(module=model, **keywords) as memory:  # type: ignore[arg-type]
        seen = train(model, batches, memory, loss)
        memory.report()
    pairs = [pair for both in zip(seen.gradients, plain.gradients, strict=True) for pair in zip(*both, strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return seen.phases, memory


def batches_of(*rows: int) -> list[Tensor]:
    return [torch.randn(n, WIDTH) for n in rows]


@pytest.mark.parametrize("policy", ["auto", "all-swap", "all-recompute", "keep-all"])
def test_followed_from_the_first_step(tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it does, with room for it."""
    path = written(tmp_path, captured(), policy, share=1.1)
    phases, memory = compared(net(), batches_of(*[ROWS] * 4), plan=path, budget="1GiB")
    assert phases == ["planned"] * 4
    plan, graph, report = MemoryPlan.from_json(path.read_text()), captured(), memory.report()
    assert report.swapped_bytes == plan.bytes_of(graph, "swap")
    assert report.recomputed_bytes == plan.bytes_of(graph, "recompute")
    assert report.num_mismatched == 0
    assert not caplog.messages


def logged_loss(model: nn.Module, x: Tensor) -> Tensor:
    """The same loss by other ops, between layers too, some of which save a number or keep a value."""
    scale = torch.ones((), requires_grad=True)
    for i, layer in enumerate(model):  # type: ignore[arg-type]
        x = layer(x)
        if i % 4 == 3:
            for _ in range(30):
                x.detach().abs().mean().add(1).mul(2).clone()
    return x.square().mean() * scale / 3


def test_ops_that_ask_for_nothing_may_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of ops more in forward, a loss that is scaled by a parameter, and the plan goes on."""
    path = written(tmp_path, captured(), share=0.5)
    phases, memory = compared(net(), batches_of(*[ROWS] * 4), logged_loss, plan=path, budget="1GiB")
    assert phases == ["planned"] * 4
    assert memory.report().swapped_bytes + memory.report().recomputed_bytes > 0
    assert not caplog.messages


def test_another_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line says where it parts; the next step is recorded, and planned as without it."""
    path = written(tmp_path, captured(), share=0.5)
    other = net()
    other[8], other[9], other[12] = nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Linear(64, WIDTH)
    phases, _ = compared(other, batches_of(*[ROWS] * 5), plan=path, budget="1GiB")
    assert phases[:2] == ["planned", "recording"]
    assert phases[-1] == "planned"
    (message,) = caplog.messages
    assert f"plan {str(path)!r} does not match the training step: after " in message
    assert "saved tensors, in `9`, aten.addmm.default made 16384 bytes in place of 24576;" in message
    assert message.endswith("the step is recorded and planned here instead")


def test_a_model_that_ends_early(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the plan was to let leave has not come when backward begins: that is told of as well."""
    path = written(tmp_path, captured(depth=5), "all-swap", share=1)
    phases, _ = compared(net(depth=3), batches_of(*[ROWS] * 5), plan=path, budget="1GiB")
    assert phases[:2] == ["planned", "recording"]
    (message,) = caplog.messages
    assert "forward ended before" in message or "backward began where" in message


def test_another_batch_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first shape is not its own, the second one is; a third one does not try it any more."""
    path = written(tmp_path, captured())
    phases, _ = compared(net(), batches_of(40, ROWS, ROWS, 40, 32, ROWS), plan=path, budget="1GiB")
    assert phases == ["planned", "planned", "planned", "recording", "recording", "planned"]
    (message,) = caplog.messages
    assert "after 0 saved tensors, in `0`, " in message or "after 1 saved tensors, in `0`, " in message


def test_no_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where what is on the device leaves it none, its step is planned anew within the budget, before the first step."""
    caplog.set_level(logging.INFO, "lightning_offload")
    path, batches = written(tmp_path, captured(), share=0.9), batches_of(ROWS)
    with MemoryPlugin("1GiB", plan=path, module=(model := net())) as memory:
        train(model, batches, memory)  # one step: later ones have the gradients of earlier ones beside them
        needed, floor = memory.report().predicted_peak_bytes, memory.report().floor_bytes
    assert needed is not None
    assert floor is not None
    assert "planned anew" not in caplog.text
    del model, memory
    budget = floor + (needed - floor) // 2
    phases, _ = compared(net(), batches, plan=path, budget=f"{budget}B")
    assert phases == ["planned"]
    assert "its step is planned anew" in caplog.text


def test_its_budget_is_the_default(tmp_path: Path) -> None:
    """Without a budget that of the plan is kept, however small; one that is given goes first."""
    path = written(tmp_path, captured(), share=0.5)
    budget_bytes = MemoryPlan.from_json(path.read_text()).budget_bytes
    assert MemoryPlugin(plan=path).budget_bytes == budget_bytes
    assert MemoryPlugin("1GiB", plan=path).budget_bytes == 1 << 30


@pytest.mark.usefixtures("in_python")
def test_without_its_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It waits for the first recording, and is in force from the second step on; another one is told of, once."""
    graph = captured()
    path = written(tmp_path, graph, share=0.5)
    sibling_graph(path).unlink()
    for given in (path, MemoryPlan.from_json(path.read_text())):
        phases, memory = compared(net(), batches_of(*[ROWS] * 4), plan=given, budget="1GiB")
        assert phases[:2] == ["recording", "verifying"]
        plan = MemoryPlan.from_json(path.read_text())
        assert memory.report().swapped_bytes == plan.bytes_of(graph, "swap")
    assert not caplog.messages
    compared(net(depth=3), batches_of(*[ROWS] * 4), plan=path, budget="1GiB")
    (message,) = caplog.messages
    assert "is for another step than the recorded one" in message


def test_a_step_that_is_not_the_plans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That of another plan is told of and left alone; one that cannot be read is an error."""
    path = written(tmp_path, captured())
    sibling_graph(path).write_text(captured(depth=2).to_json())
    MemoryPlugin(plan=path)
    (message,) = caplog.messages
    assert "is the step of another plan" in message
    sibling_graph(path).write_text("{}")
    with pytest.raises(PlanError, match=r"plan\.graph\.json', the step of plan .* cannot be read"):
        MemoryPlugin(plan=path)


def test_checkpoints_leave_it_out(tmp_path: Path) -> None:
    """What was captured elsewhere is given again by whoever goes on."""
    path = written(tmp_path, captured())
    _, memory = compared(net(), batches_of(ROWS, ROWS), plan=path, budget="1GiB")
    assert memory.state_dict()["plans"] == []


# ---- the follower

PACK_BYTES = (5000, 4, 6000, 7000, 6000, 8000)
ROUTE = SizeRoute(
    matters=(False, False, False, True, False, True),
    modules=("a", "", "b", "c", "d", "e"),
    unpacks=((5,), (4,), (3,), (2,), (1,), (0,)),
)


def _follower(num_first_packs: int = len(PACK_BYTES)) -> BySize:
    graph = chain(10)
    program = compile_plan(graph, plan_of(graph))
    return BySize(dataclasses.replace(program, pack_bytes=PACK_BYTES, num_first_packs=num_first_packs), ROUTE)


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([5000, 4, 6000, 7000, 6000, 8000], [0, 1, 2, 3, 4, 5]),
        ([5000, 8, 4, 6000, TINY_BYTES, 7000], [0, -1, 1, 2, -1, 3]),
        ([6000, 7000], [2, 3]),
        ([7000, 8000, 4], [3, 5, -1]),
        ([5000, 8000], [0, LEFT]),
        ([5000, 5001], [0, LEFT]),
    ],
)
def test_what_is_saved_is_followed(sizes: list[int], places: list[int]) -> None:
    """What it keeps may be missing, tiny ones may come in between, what leaves the device must come."""
    follower = _follower()
    assert [follower.place_of(i, size) for i, size in enumerate(sizes)] == places


def test_unpacks_are_known_by_what_they_unpack() -> None:
    """Others in between count for nothing; what is passed over is behind as well."""
    follower = _follower()
    for index, size in enumerate([5000, 9, 6000, 7000, 8000]):
        follower.place_of(index, size)
    assert not follower.lacks(5, sees_ops=False)
    assert [list(follower.passed_unpacks(index, 0)) for index in (1, 4, 3, 3, 0)] == [[], [0], [1, 2], [], [3, 4, 5]]


def test_a_forward_that_ends_early() -> None:
    """Is known by what has not come."""
    for num_first, words in ((6, "backward began where one of 4 bytes was expected"), (3, "")):
        follower = _follower(num_first)
        follower.place_of(0, 5000)
        assert follower.lacks(1, sees_ops=False) == words
