"""A step as the published systems see it: layers in the order of forward, and of backward.

Those systems decide for each layer of a static network about its input or output. What we decide about is a saved
storage, so a *layer* here is a candidate storage together with the ops between the saved storages before it and
itself: those that a replay of it runs. Its kind is that of the heaviest of them (a convolution whose own output
is not saved, because the activation function after it saves its result, makes that result the convolution's), or
else that of the last one. In-place ops write on the same storage, as in-place layers of Caffe do.

In backward a *node* is what autograd runs at once: unpacks with no op between them, then the ops of the gradient.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.step_graph import Op
from lightning_offload.planning.policies.kinds import DEAR, Kind, kind_of
from lightning_offload.planning.problem import MAX_REPLAYED_OPS, Candidate, Problem, walk_back
from lightning_offload.planning.simulator import Actions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A candidate storage as the output of a layer, and as the input of those that read it.

    Attributes:
        storage: Index in the graph.
        kind: What makes it.
        num_bytes: Size.
        producer: Op that makes the saved value, -1 if none was recorded.
        chain: Ops that a replay of it runs, from the saved storages before it; unordered.
        sources: Saved storages that they read, where it may be recomputed.
        seconds: Their duration.
        readers: Ops of forward that read the saved value.
        last_used: Tick of the last of them, or of its first pack if that is later.
        first_unpack: Tick of its first unpack; the end of the step if there is none.
        can_swap: Whether it may be swapped.
        can_recompute: Whether it may be recomputed, by no more ops than a planner considers.
    """

    storage: int
    kind: Kind
    num_bytes: int
    producer: int
    chain: tuple[int, ...]
    sources: tuple[int, ...]
    seconds: float
    readers: tuple[int, ...]
    last_used: int
    first_unpack: int
    can_swap: bool
    can_recompute: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of autograd's graph, as backward runs it.

    Attributes:
        kind: Of its first op.
        ordinal: Of its first unpack.
        tick: Of that.
        until: First tick past its last unpack.
    """

    kind: Kind
    ordinal: int
    tick: int
    until: int


class Layers:
    """A step's saved storages by the layers that made them, as the layer-wise policies speak of them.

    Attributes:
        problem: The step.
        by_storage: The layers, in the order in which forward makes them.
        nodes: The nodes of backward that read anything back, in order.
        starts: Seconds from the start of the step to each tick, with everything kept.
        forward_ticks: Ticks of forward's ops, views left out.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        graph = problem.graph
        self.starts: npt.NDArray[np.float64] = np.concatenate(([0.0], np.cumsum(problem.seconds)))
        forward = [i for i, op in enumerate(graph.ops) if op.phase == "forward" and op.outputs]
        self.forward_ticks: npt.NDArray[np.int64] = np.array([graph.ops[i].tick for i in forward], dtype=np.int64)
        readers: dict[int, list[int]] = {}
        for i in forward:
            for v in graph.ops[i].inputs:
                readers.setdefault(v, []).append(i)
        first_unpack: dict[int, int] = {}
        for unpack in problem.unpacks:
            first_unpack.setdefault(unpack.storage, unpack.tick)
        in_order = sorted(problem.candidates.values(), key=lambda c: (graph.values[c.value].producer, c.storage))
        self.by_storage = {c.storage: self._layer(c, readers.get(c.value, []), first_unpack) for c in in_order}
        self._first_unpacks = {s: layer.first_unpack for s, layer in self.by_storage.items()}
        self.nodes = _nodes(problem)
        self._node_ends = [node.until for node in self.nodes]

    def _layer(self, candidate: Candidate, readers: list[int], first_unpack: Mapping[int, int]) -> Layer:
        problem, graph = self.problem, self.problem.graph
        producer = graph.values[candidate.value].producer
        chain, saved = walk_back(problem, candidate.value, MAX_REPLAYED_OPS)
        can_recompute = candidate.can_recompute and len(chain) <= MAX_REPLAYED_OPS
        kinds = {_kind_in(problem, graph.ops[i]) for i in chain}
        last = _kind_in(problem, graph.ops[producer]) if producer >= 0 else Kind.OTHER
        return Layer(
            storage=candidate.storage,
            kind=next((kind for kind in DEAR if kind in kinds), last),
            num_bytes=candidate.num_bytes,
            producer=producer,
            chain=chain,
            sources=tuple(dict.fromkeys(graph.values[v].storage for v in saved)) if can_recompute else (),
            seconds=sum(graph.ops[i].seconds for i in chain),
            readers=tuple(readers),
            last_used=max([graph.ops[i].tick for i in readers] + [candidate.pack_tick]),
            first_unpack=first_unpack.get(candidate.storage, graph.num_ticks),
            can_swap=candidate.can_swap,
            can_recompute=can_recompute,
        )

    def reader_kinds(self, layer: Layer) -> set[Kind]:
        """Kinds of the ops of forward that read a layer's output."""
        return {kind_of(self.problem.graph.ops[i].name) for i in layer.readers}

    def swappable(self) -> list[int]:
        """Storages that may be swapped, in order."""
        return [s for s, layer in self.by_storage.items() if layer.can_swap]

    def needs(self, actions: Actions) -> dict[int, int]:
        """By storage: the tick at which it is first needed, by its own unpack or for a replay that reads it."""
        needs = self._first_unpacks.copy()
        if "recompute" not in actions.values():
            return needs
        for s, layer in reversed(self.by_storage.items()):
            if actions.get(s) == "recompute":
                for source in layer.sources:
                    if source in needs:
                        needs[source] = min(needs[source], needs[s])
        return needs

    def node_at(self, tick: int) -> int:
        """The node among whose unpacks a tick is; their number for a tick past all of them."""
        return bisect.bisect_right(self._node_ends, tick)

    def away_seconds(self, layer: Layer) -> float:
        """Time between the last use of a layer's output in forward and its first in backward."""
        return float(self.starts[layer.first_unpack] - self.starts[min(layer.last_used + 1, len(self.starts) - 1)])

    def working_set_bytes(self) -> int:
        """The most that one op has as inputs, outputs and workspace together, state from before the step aside."""
        graph = self.problem.graph
        return max((sum(_sizes(self.problem, op)) + op.workspace_bytes for op in graph.ops), default=0)


def _sizes(problem: Problem, op: Op) -> list[int]:
    storages = {problem.graph.values[v].storage for v in (*op.inputs, *op.outputs)}
    return [problem.graph.storages[s].num_bytes for s in storages if not problem.graph.storages[s].is_persistent]


def _kind_in(problem: Problem, op: Op) -> Kind:
    """An op's kind; adding a parameter, a constant or a mask of another size is no join."""
    kind = kind_of(op.name)
    if kind is not Kind.JOIN:
        return kind
    made = [v for v in op.inputs if not problem.graph.storages[problem.graph.values[v].storage].is_persistent]
    sizes = [problem.graph.storages[problem.graph.values[v].storage].num_bytes for v in made]
    return Kind.JOIN if len(made) > 1 and sizes.count(max(sizes)) > 1 else Kind.OTHER


def _nodes(problem: Problem) -> tuple[Node, ...]:
    """Group unpacks that no op with a result separates."""
    ops = [op for op in problem.graph.ops if op.outputs]
    op_ticks = np.array([op.tick for op in ops], dtype=np.int64)
    following = np.searchsorted(op_ticks, problem.unpack_ticks).tolist()
    nodes: list[Node] = []
    for ordinal, (unpack, i) in enumerate(zip(problem.unpacks, following, strict=True)):
        until = unpack.tick + 1
        if ordinal and following[ordinal - 1] == i:
            nodes[-1] = dataclasses.replace(nodes[-1], until=until)
        else:
            kind = kind_of(ops[i].name) if i < len(ops) else Kind.OTHER
            nodes.append(Node(kind=kind, ordinal=ordinal, tick=unpack.tick, until=until))
    return tuple(nodes)


def layers_of(problem: Problem) -> Layers:
    """The view of a problem, made once: several policies look at it, one after another."""
    view = problem.views.get(Layers)
    if view is None:
        view = problem.views[Layers] = Layers(problem)
    assert isinstance(view, Layers)
    return view
