"""Compiled submodules stay compiled inside a step, and equal plain compiled runs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.sight import engine_on
from lightning_offload.tensors import compiled_code
from tests.engine.harness import Wrap, assert_same, run
from tests.shares import pairs
from tests.zoo.case import Case
from tests.zoo.models.sandwich import WIDTH, Sandwich, body_case

pytestmark = [  # the compiler's own, some of them raised by what it looks at while tracing
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    ),
]


class Counts:
    """How many graphs a backend was given, and how often they ran."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_runs = 0

    def backend(self, name: str) -> Callable[..., Any]:
        """Wrap a backend so that it counts."""
        compile_graph = lookup_backend(name)

        def compiled(graph: Any, inputs: Any) -> Callable[..., Any]:
            self.num_graphs += 1
            runnable = compile_graph(graph, inputs)

            def counted(*args: Any) -> Any:
                self.num_runs += 1
                return runnable(*args)

            return counted

        return compiled


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _Compiled(nn.Module):
    """A block compiled with a counting backend."""

    def __init__(self, counts: Counts, backend: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.compiled = torch.compile(self._block, backend=counts.backend(backend), fullgraph=True)

    def _block(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x).sin()
        return hidden * x.sigmoid() + hidden.exp().clamp(max=2.0)

    def forward(self, x: Tensor) -> Tensor:
        """Run the compiled block between eager ops."""
        out: Tensor = self.compiled(x.tanh())
        return out.relu()


def _case(counts: Counts, backend: str) -> Case:
    return body_case("compiled", module=lambda: _Compiled(counts, backend), depth=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("wrap", "policy"), pairs(list(Wrap), ["all-swap", "all-recompute"], every=2), ids=lambda value: str(value)
)
def test_compiled_block_stays_compiled(backend: str, policy: str, wrap: Wrap) -> None:
    """As many graphs and runs as without the plugin, and the same bits."""
    plain, planned = Counts(), Counts()
    expected = run(_case(plain, backend))
    torch._dynamo.reset()
    memory = MemoryPlugin(budget=None, policy=policy)
    actual = run(_case(planned, backend), memory=memory, wrap=wrap)
    assert_same(expected, actual)
    assert plain.num_graphs > 0
    assert (planned.num_graphs, planned.num_runs) == (plain.num_graphs, plain.num_runs)


def test_compiled_step_under_one_plugin_after_a_plain_one() -> None:
    """Code compiled in a plain step is used again inside a planned one."""
    counts = Counts()
    model = Sandwich(_Compiled(counts, "aot_eager"), depth=1)
    batch = torch.randn(768, WIDTH)
    model(batch).sum().backward()
    num_graphs = counts.num_graphs
    with MemoryPlugin(budget=None, policy="all-swap") as memory:
        for _ in range(4):
            with memory.step(batch):
                model(batch).sum().backward()
    assert counts.num_graphs == num_graphs
    assert counts.num_runs == 5


def _runs_eagerly_in_part(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x @ weight
    try:
        torch._dynamo.graph_break()  # within `try`: the compiler leaves the whole frame to Python
        hidden = hidden.sin()
        hidden = hidden * hidden.exp()
    finally:
        torch._dynamo.graph_break()
    return hidden.sum()


def _runs_backward(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x @ weight).sin()
    loss = (hidden * hidden.exp()).sum()
    torch._dynamo.graph_break()
    loss.backward()
    return loss


@pytest.mark.parametrize("policy", ["keep-all", "all-swap", "all-recompute"])
@pytest.mark.parametrize("function", [_runs_eagerly_in_part, _runs_backward])
def test_the_runtime_is_not_compiled(function: Callable[[Tensor, Tensor], Tensor], policy: str) -> None:
    """What autograd calls between the graphs of a compiled function is not looked at: as many graphs, the same bits."""

    def train(memory: MemoryPlugin | None) -> tuple[list[Tensor], Counts]:
        torch._dynamo.reset()
        counts = Counts()
        compiled = torch.compile(function, backend=counts.backend("aot_eager"))
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(8, 8))
        gradients = []
        for _ in range(5):
            with memory.step() if memory is not None else contextlib.nullcontext():
                loss = compiled(torch.randn(8, 8) * 1, weight)
                if function is not _runs_backward:
                    loss.backward()
            assert weight.grad is not None
            gradients.append(weight.grad)
            weight.grad = None
        return gradients, counts

    expected, plain = train(None)
    with MemoryPlugin(device="cpu", policy=policy) as memory:
        actual, planned = train(memory)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert planned.num_graphs == plain.num_graphs


def test_named_for_the_compiler_and_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries name functions for it as they are imported: steps have their engine once one has called none."""
    monkeypatch.delenv("LIGHTNING_OFFLOAD_ENGINE", raising=False)
    before = engine_on(torch.device("cpu"))
    function = torch.compile(lambda x: x.sin() * 2, backend="eager")
    assert compiled_code.is_in_use()
    assert engine_on(torch.device("cpu")) == "python: torch.compile is in use"
    case = body_case("named", lambda x: x.tanh().exp())
    expected = run(case)
    assert_same(expected, run(case, memory=MemoryPlugin(None, policy="all-recompute")))
    assert engine_on(torch.device("cpu")) in (before, "native")
    function(torch.ones(2))
    assert engine_on(torch.device("cpu")) == "python: torch.compile is in use"
    assert_same(expected, run(case, memory=MemoryPlugin(None, policy="all-recompute")))
