"""A step as layers: kinds, order, readers, needs, and the nodes of backward."""

from __future__ import annotations

from lightning_offload.planning.policies.kinds import Kind
from lightning_offload.planning.policies.layers import Layers
from lightning_offload.planning.problem import Problem
from tests.planning.policies.nets import Net, conv_bn_relu, conv_relu


def test_kind_is_that_of_the_heaviest_op_between_saved_storages() -> None:
    """A ReLU behind a convolution that nobody saves is the convolution's output; behind a saved result it is not."""
    layers = Layers(Problem(conv_relu())).by_storage
    assert {s: layer.kind for s, layer in layers.items()} == dict.fromkeys((2, 4, 6, 8), Kind.CONV)
    assert [layer.chain for layer in layers.values()] == [(1, 0), (3, 2), (5, 4), (7, 6)]
    layers = Layers(Problem(conv_bn_relu())).by_storage
    assert [layer.kind for layer in layers.values()] == [Kind.CONV, Kind.ACTIVATION] * 3
    assert [layer.seconds for layer in layers.values()] == [8.0, 2.0] * 3


def test_readers_and_last_use() -> None:
    """Readers are ops of forward that read the saved value, not an in-place op before it; a late pack is a use."""
    graph = conv_bn_relu()
    layers = Layers(Problem(graph)).by_storage
    assert [graph.ops[i].name for i in layers[2].readers] == ["aten.convolution.default"]
    assert layers[2].last_used == graph.ops[layers[2].readers[0]].tick
    assert layers[6].readers == ()
    assert layers[6].last_used == max(save.pack_tick for save in graph.saves)


def test_nodes_of_backward_are_in_order_with_their_kinds() -> None:
    """One node for each layer that reads anything back."""
    nodes = Layers(Problem(conv_bn_relu(depth=2))).nodes
    assert [node.kind for node in nodes] == [Kind.ACTIVATION, Kind.OTHER, Kind.CONV] * 2
    assert [node.ordinal for node in nodes] == list(range(6))


def test_unpacks_without_an_op_between_them_are_one_node() -> None:
    """A layer that saves two tensors reads them at once; a view between them changes nothing."""
    net = Net()
    a, b = (net.make(100, net.given(1)) for _ in range(2))
    first, second = net.pack(a), net.pack(b)
    net.make(100, a, b)
    net.backward()
    net.unpack(first)
    net.op((a,), (), name="aten.detach.default")
    net.unpack(second)
    net.op((a, b), (10,), name="aten.mm.default")
    layers = Layers(Problem(net.build()))
    (node,) = layers.nodes
    assert (node.kind, node.ordinal, node.until - node.tick) == (Kind.LINEAR, 0, 3)
    assert [layers.node_at(tick) for tick in (node.tick, node.until - 1, node.until)] == [0, 0, 1]


def test_only_sums_of_two_activations_of_a_size_are_joins() -> None:
    """A bias, a mask of another size and a scalar are no second branch."""
    kinds = {}
    for other in ("activation", "parameter", "small", "none"):
        net = Net()
        given = net.given(100)
        x = net.make(100, given)
        small = net.make(10, given)
        others = {"activation": (net.make(100, given),), "parameter": (given,), "small": (small,), "none": ()}[other]
        y = net.layer("add", x, *others, save="output")
        kinds[other] = Layers(Problem(net.finish())).by_storage[net.values[y].storage].kind
    assert kinds == {
        "activation": Kind.JOIN,
        "parameter": Kind.OTHER,
        "small": Kind.OTHER,
        "none": Kind.OTHER,
    }


def test_needs_follow_replays() -> None:
    """What a replay reads is needed when that replay runs, which may be before its own unpack; chains count."""
    layers = Layers(Problem(conv_bn_relu()))
    own = {s: layer.first_unpack for s, layer in layers.by_storage.items()}
    assert layers.needs({}) == own
    needs = layers.needs({4: "recompute"})
    assert needs == own | {3: own[4]}
    chained = layers.needs({6: "recompute", 5: "recompute", 4: "recompute"})
    assert chained == dict.fromkeys((3, 4, 5, 6), own[6]) | {1: own[1], 2: own[2]}


def test_working_set_is_the_most_that_one_op_holds() -> None:
    """Inputs, outputs and workspace of the largest op; parameters and the batch are not counted."""
    net = Net()
    x = net.make(300, net.given(5000))
    net.op((x,), (200,), workspace_bytes=70)
    net.op((x,), (250,))
    assert Layers(Problem(net.build())).working_set_bytes() == 570


def test_away_seconds_run_from_last_use_to_first_need() -> None:
    """Between the end of the op that reads a storage last in forward and the first unpack in backward."""
    layers = Layers(Problem(conv_relu(depth=3)))
    assert [layers.away_seconds(layer) for layer in layers.by_storage.values()] == [6.0, 2.0, 0.0]
