"""What a recording says of small programs, op by op."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_offload.capture.recorder import Recorder
from lightning_offload.graph import StepGraph
from lightning_offload.graph.step_graph import check
from tests.capture.recording import CPU, observe, op_names, record, sizes

ROW = 4 * 100
"""Bytes of one vector of 100 numbers."""


def leaf(num: int = 100) -> Tensor:
    """A trainable vector."""
    return torch.linspace(-1.0, 1.0, num).requires_grad_()


def test_chain_of_two_by_hand() -> None:
    """Two ops, their inputs and outputs, their saves, and the order of unpacks and releases."""
    x = leaf()

    def step() -> None:
        x.exp().sin().backward(torch.ones(100))

    graph = record(step)
    check(graph)
    assert op_names(graph) == ["exp.default", "sin.default", "ones.default"]
    arithmetic = [name for name in op_names(graph, "backward") if name != "detach.default"]
    assert arithmetic == ["cos.default", "mul.Tensor", "mul.Tensor"]
    exp, sin = graph.ops[:2]
    assert [len(exp.inputs), len(exp.outputs), sin.inputs == exp.outputs] == [1, 1, True]
    assert sizes(graph, exp.inputs + exp.outputs) == [ROW, ROW]
    # autograd saves exp's result twice: for exp itself and for sin
    assert [save.value for save in graph.saves] == [exp.outputs[0], exp.outputs[0]]
    by_sin, by_exp = sorted(graph.saves, key=lambda save: save.unpack_ticks)
    assert by_sin.unpack_ticks[0] < by_sin.release_tick <= by_exp.unpack_ticks[0] < by_exp.release_tick
    assert all(op.replayable for op in graph.ops)
    assert all(op.seconds >= 0 for op in graph.ops)


def test_births_and_deaths() -> None:
    """A result lives from its op to its last reference; leaves from before the step to after it."""
    x = leaf()

    def step() -> None:
        first = x + 1.0  # op 0
        second = first * 2.0  # op 1
        del first
        third = second - 1.0  # op 2
        del second
        third.neg()  # op 3, dropped at once
        del third

    graph = record(step)
    ticks = [op.tick for op in graph.ops]
    lives = [(s.birth, s.death) for s in graph.storages]
    assert lives[0] == (-1, graph.num_ticks)
    assert lives[1] == (ticks[0], ticks[1] + 1)
    assert lives[2] == (ticks[1], ticks[2] + 1)
    assert lives[3] == (ticks[2], ticks[3] + 1)
    assert lives[4] == (ticks[3], ticks[3] + 1)
    assert graph.storages[0].is_persistent


def test_gradients_outlive_the_step() -> None:
    """The gradient that backward leaves behind is alive at the end; everything else made in it is gone."""
    x = leaf()

    def step() -> None:
        (x * x).sum().backward()
        torch.zeros(0)  # by now the temporaries of backward are gone

    graph = record(step)
    survivors = [s.num_bytes for s in graph.storages if s.num_bytes and s.birth >= 0 and s.death == graph.num_ticks]
    assert survivors == [ROW]
    assert x.grad is not None
    assert graph.gradient_bytes == 0


def test_unseen_backward_is_made_up_for() -> None:
    """Where backward was not seen op by op, the gradients it will leave are counted from the leaves."""
    x, y = leaf(), leaf(50)
    graph = record(lambda: x.exp().sum() + y.exp().sum())
    assert graph.gradient_bytes == x.nbytes + y.nbytes


def test_views_share_one_storage() -> None:
    """Transposes and slices are ops that make no value; what they save is the value viewed."""
    x = leaf()

    def step() -> Tensor:
        square = x.exp().view(10, 10)
        return (square.t()[:4] * 2.0).cos()

    graph = record(step)
    names = op_names(graph)
    assert names == ["exp.default", "view.default", "t.default", "slice.Tensor", "mul.Tensor", "cos.default"]
    assert [len(op.outputs) for op in graph.ops] == [1, 0, 0, 0, 1, 1]
    assert graph.ops[4].inputs == graph.ops[0].outputs
    assert len(graph.storages) == 4


def test_in_place_op_makes_a_new_value_on_the_same_storage() -> None:
    """The writer reads the old value, makes a new one, and later readers read that."""
    x = leaf()

    def step() -> Tensor:
        y = x * 2.0
        y.add_(1.0)
        y[:10].relu_()
        return y.sin()

    graph = record(step)
    mul, add, _, relu, sin = (op for op in graph.ops if op.name != "aten.view.default")
    assert op_names(graph)[1] == "add_.Tensor"
    (first,), (second,), (third,) = mul.outputs, add.outputs, relu.outputs
    assert add.inputs == (first,)
    assert relu.inputs == (second,)
    assert sin.inputs == (third,)
    assert len({graph.values[v].storage for v in (first, second, third)}) == 1
    assert len({first, second, third}) == 3


def test_written_after_save_must_be_kept() -> None:
    """A tensor that is written while autograd holds it may not leave the device."""
    x = leaf()

    def step() -> None:
        y = x * 2.0
        results.append(y.sin())
        y.zero_()
        y.exp()

    results: list[Tensor] = []
    assert [save.must_keep for save in record(step).saves] == [True, False]


def test_leaves_are_persistent() -> None:
    """Parameters that were saved existed before the step, and are reported as leaves by weak reference."""
    layer = nn.Linear(10, 10)
    recorder = Recorder(CPU)
    observe(lambda: layer(torch.ones(2, 10)).sum(), recorder)
    leaves = [reference() for reference in recorder.leaves.values()]
    assert {id(t) for t in leaves} == {id(layer.weight), id(layer.bias)}
    touched = {p.untyped_storage()._cdata for p in layer.parameters()}
    assert touched <= set(recorder.persistent_ids())
    graph = recorder.finish()
    saved = [graph.storages[graph.values[save.value].storage] for save in graph.saves]
    assert all(s.is_persistent or s.birth >= 0 for s in saved)
    assert graph.persistent_bytes == layer.weight.nbytes + layer.bias.nbytes


def test_reused_addresses_are_new_storages() -> None:
    """Each of many tensors that lie at one address in turn has its own storage in the graph."""
    x = leaf()

    def step() -> None:
        for _ in range(5):
            x.detach() + 1.0

    graph = record(step)
    made = [op.outputs[0] for op in graph.ops if op.name == "aten.add.Tensor"]
    assert len({graph.values[v].storage for v in made}) == 5


def test_multi_output_op_makes_several_storages() -> None:
    """Every result has its own storage and value."""
    graph = record(lambda: torch.topk(leaf(), 7))
    (topk,) = [op for op in graph.ops if op.name == "aten.topk.default"]
    assert sizes(graph, topk.outputs) == [7 * 4, 7 * 8]


def test_batch_norm_writes_its_statistics() -> None:
    """In training the running statistics get new values, and are not read by a replay."""
    norm = nn.BatchNorm1d(3)
    graph = record(lambda: norm(torch.randn(4, 3)).sum(), norm)
    (op,) = [op for op in graph.ops if "batch_norm" in op.name]
    storages = [graph.storages[graph.values[v].storage] for v in op.outputs]
    assert [s.is_persistent for s in storages] == [False, False, False, True, True]
    assert all(v not in op.inputs for v in op.outputs)
    assert len(op.inputs) == 3


def test_unread_and_dropped_saves() -> None:
    """A save that is dropped without being read has a release and no unpacks; one that is never dropped, neither."""
    x = leaf()
    held: list[Tensor] = []

    def step() -> None:
        x.exp()
        held.append(x.exp())

    first, second = record(step).saves
    assert (first.unpack_ticks, second.unpack_ticks) == ((), ())
    graph = record(step)
    first, second = graph.saves
    assert first.release_tick < graph.num_ticks
    assert second.release_tick == graph.num_ticks


def test_retained_graph_is_unpacked_twice() -> None:
    """Two backwards over one graph unpack each save twice."""
    x = leaf()

    def step() -> None:
        loss = x.exp().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    (save,) = record(step).saves
    assert len(save.unpack_ticks) == 2


def test_modules_are_named_without_hooks() -> None:
    """Ops and saves carry the innermost module's name; backward's ops that of the save read last."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(10, 10), nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x)
            return y.exp().sum()

    net = Net()
    for module in (net, None):  # found from the stack where no module was given
        graph = record(lambda: net(torch.ones(2, 10)).backward(), module)
        by_name = {op.name: op.module for op in graph.ops if op.phase == "forward"}
        assert by_name["aten.addmm.default"] == "block.0"
        assert by_name["aten.sigmoid.default"] == "block.1"
        assert by_name["aten.exp.default"] == ""
        assert {save.module for save in graph.saves} == {"block.0", "block.1", ""}
        (backward,) = [op for op in graph.ops if op.name == "aten.sigmoid_backward.default"]
        assert (backward.module, backward.phase) == ("block.1", "backward")
    assert not net._forward_hooks
    assert not net.block[0]._forward_pre_hooks


def test_other_tensors_must_be_kept() -> None:
    """A saved sparse tensor is an empty storage that must be kept; ops on it are not replayed."""
    weight = leaf(9)
    sparse = torch.eye(9).to_sparse()
    graph = record(lambda: torch.sparse.mm(sparse, weight.view(9, 1)).sum().backward())
    assert any(save.must_keep for save in graph.saves)
    check(graph)


def test_recording_keeps_nothing_alive() -> None:
    """A recorder holds no tensor: all results are freed when the program drops them."""
    x = leaf()
    alive: list[weakref.ref[Tensor]] = []

    def step() -> None:
        y = x.exp().sin()
        alive.append(weakref.ref(y.untyped_storage()))  # type: ignore[arg-type]

    recorder = Recorder(CPU)
    gc.disable()
    try:
        observe(step, recorder)
        assert alive[0]() is None
    finally:
        gc.enable()
    assert recorder.finish().num_ticks > 0


def test_events_after_the_end_are_ignored() -> None:
    """A backward that comes after the recording changes nothing in the graph."""
    x = leaf()
    recorder = Recorder(CPU)
    losses: list[Tensor] = []
    observe(lambda: losses.append(x.exp().sum()), recorder)
    graph = recorder.finish()
    losses[0].backward()
    assert recorder.finish() == graph
    assert recorder.num_unpacks == 1


@pytest.mark.parametrize("repeat", range(2))
def test_recording_is_reproducible(repeat: int) -> None:
    """Two recordings of one program have one digest."""
    net = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(20, 3))

    def once() -> StepGraph:
        return record(lambda: net(torch.randn(8, 10)).square().mean().backward(), net)

    once()  # gradients accumulate from the second on
    assert once().digest() == once().digest()


def test_graph_round_trips() -> None:
    """A real recording survives its JSON."""
    net = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 3))
    graph = record(lambda: net(torch.randn(8, 10)).sum().backward(), net)
    assert StepGraph.from_json(graph.to_json()) == graph
