"""Write steps of small networks by hand, layer by layer, the way autograd saves and runs them."""

from __future__ import annotations

import dataclasses

from lightning_offload.graph import MemoryPlan, StepGraph
from tests.graph.building import GraphBuilder


@dataclasses.dataclass
class _Node:
    name: str
    module: str
    saves: list[int]


class Net(GraphBuilder):
    """Adds layers that save what the backward of such a layer needs; backward follows in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: list[_Node] = []

    def layer(
        self,
        name: str,
        *inputs: int,
        size: int = 100,
        save: str = "input",
        seconds: float = 1.0,
        module: str = "",
        replayable: bool = True,
    ) -> int:
        """Run an aten op on values; save its first input, its output, or nothing."""
        saves = [self.pack(inputs[0], module=module)] if save == "input" else []
        (out,) = self.op(
            inputs, (size,), name=f"aten.{name}.default", seconds=seconds, module=module, replayable=replayable
        )
        if save == "output":
            saves = [self.pack(out, module=module)]
        self._nodes.append(_Node(name, module, saves))
        return out

    def inplace(self, name: str, value: int, *others: int, save: bool = True, module: str = "") -> int:
        """Run an op in place; it saves its result, as ReLU does, or nothing."""
        (out,) = self.op((value, *others), writes=(value,), name=f"aten.{name}.default", module=module)
        self._nodes.append(_Node(name, module, [self.pack(out, module=module)] if save else []))
        return out

    def finish(self, gradient_bytes: int = 10) -> StepGraph:
        """Run backward; forward forgets each result after the last op that reads it."""
        made = {value.storage for value in self.values if self.storages[value.storage][1] >= 0}
        self.deaths = dict.fromkeys(made, self.tick)
        for op in self.ops:
            self.deaths |= {s: op.tick + 1 for v in op.inputs if (s := self.values[v].storage) in made}
        self.backward()
        for node in reversed(self._nodes):
            for save in node.saves:
                self.unpack(save)
            (gradient,) = self.op((), (gradient_bytes,), name=f"aten.{node.name}_backward.default", module=node.module)
            self.release(*node.saves)
            self.drop(gradient)
        return self.build()


def actions_of(plan: MemoryPlan) -> dict[str, list[int]]:
    """Storages by action, in order."""
    found: dict[str, list[int]] = {"swap": [], "recompute": []}
    for decision in sorted(plan.decisions, key=lambda decision: decision.storage):
        found[decision.action].append(decision.storage)
    return found


def conv_relu(depth: int = 4, *, size: int = 100) -> StepGraph:
    """Convolutions whose results nobody saves, each followed by a ReLU that saves its own.

    Storage 0 is the batch, 2i + 1 the result of convolution i, 2i + 2 that of ReLU i. Node 2i of backward reads ReLU
    ``depth - 1 - i``, node 2i + 1 is the convolution that reads the ReLU before it.
    """
    net = Net()
    x = net.given(size)
    for i in range(depth):
        y = net.layer("convolution", x, size=size, module=f"conv{i}")
        x = net.layer("relu", y, size=size, save="output", module=f"relu{i}")
    return net.finish()


def conv_bn_relu(depth: int = 3, *, size: int = 100) -> StepGraph:
    """Convolutions with normalization and a ReLU in place: storages 2i + 1 and 2i + 2 of layer i, 0 the batch."""
    net = Net()
    x = net.given(size)
    for i in range(depth):
        y = net.layer("convolution", x, size=size, module=f"layer.{i}.conv", seconds=8.0)
        y = net.layer("native_batch_norm", y, size=size, module=f"layer.{i}.bn")
        x = net.inplace("relu_", y, module=f"layer.{i}.relu")
    return net.finish()
