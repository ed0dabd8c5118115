"""What a recording says of small programs, op by op."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload.capture import recorder
from lightning_offload.capture.recorder import Recorder
from lightning_offload.capture.timing import DeviceClock
from lightning_offload.capture.workspace import OpMemory
from lightning_offload.graph import StepGraph
from lightning_offload.graph.step_graph import check
from lightning_offload.planning.problem import Problem
from lightning_offload.runtime import executor
from lightning_offload.tensors import compiled_code, op_facts
from lightning_offload.tensors.op_facts import OpFacts, effects, facts_of
from lightning_offload.tensors.saved_forms import SavedForm
from tests.capture.devices import FakeMemory, FakeStream, pretend_on
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


def test_what_an_op_did_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recorded step the runtime and the recorder share what each op read and made; schemas are read once each."""
    found: list[str] = []
    inspected: list[str] = []

    def find(facts: OpFacts, args: Any, kwargs: Any, out: Any) -> op_facts.Effects:
        found.append(facts.name)
        return effects(facts, args, kwargs, out)

    def inspect(func: Any) -> OpFacts:
        inspected.append(str(func))
        return inspect_op(func)

    inspect_op = op_facts._inspect
    monkeypatch.setattr(op_facts, "_CACHE", {})
    monkeypatch.setattr(op_facts, "_inspect", inspect)
    monkeypatch.setattr(executor, "effects", find)
    monkeypatch.setattr(recorder, "effects", find)
    x = leaf()
    graph = record(lambda: x.exp().sin().neg().mul_(2.0).sum().backward())
    assert found == [op.name for op in graph.ops]
    assert len(inspected) == len(set(inspected))


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


@pytest.mark.usefixtures("in_python")
def test_what_a_node_made_out_of_sight_is_born_in_the_step() -> None:
    """The gradient of a formula that runs without the mode counts from there on, not as if it had been there before."""
    x = leaf()
    y = x.detach() + 1.0
    graph = record(lambda: (x * y).sin().prod().backward())  # type: ignore[no-untyped-call]
    check(graph)
    assert not any("prod" in name for name in op_names(graph, "backward"))
    (unseen,) = (value for value in graph.values if value.producer < 0 <= graph.storages[value.storage].birth)
    assert graph.storages[unseen.storage].num_bytes == 400
    assert graph.storages[unseen.storage].death < graph.num_ticks
    assert sorted(s.num_bytes for s in graph.storages if s.is_persistent and s.num_bytes) == [400, 400]


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


@pytest.mark.parametrize(("is_written", "comes_backward"), [(True, True), (True, False), (False, True)])
def test_what_is_written_after_the_scope_is_another_value_in_backward(is_written: bool, comes_backward: bool) -> None:
    """The old one is the storage's last where nothing writes it, or nothing is read afterwards."""
    shift, recorder = leaf(), Recorder(CPU)
    made: list[Tensor] = []
    observe(lambda: made.append((shift + 1.0).sin()), recorder)
    recorder.end_scope()
    if is_written:
        with torch.no_grad():
            shift.add_(1.0)
    if comes_backward:
        made.pop().sum().backward()
    graph = recorder.finish()
    (read,) = graph.ops[op_names(graph).index("add.Tensor")].inputs
    of_shift = [v for v, value in enumerate(graph.values) if value.storage == graph.values[read].storage]
    assert of_shift[0] == read
    assert graph.values[of_shift[-1]].producer == -1
    assert len(of_shift) == 1 + (is_written and comes_backward)


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


def test_what_saved_tensors_look_like_is_noted() -> None:
    """In order; and the sizes that depended on data, of whatever made them."""
    x = torch.randn(6, 5, requires_grad=True)
    is_large = x.detach()[:, 0] > 0
    recorder = Recorder(CPU)

    def step() -> None:
        picked = x[is_large].exp()
        (picked.sum() + x.sin().sum()).backward()

    observe(step, recorder)
    num_large = int(is_large.sum())
    assert recorder.open_sizes == {num_large}
    assert SavedForm(torch.float32, (num_large, 5)) in recorder.saved_forms
    assert SavedForm(torch.float32, (6, 5)) in recorder.saved_forms
    assert len(recorder.saved_forms) == len(recorder.finish().saves)


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


# ---- on an accelerator


class ByHand:
    """A recording of ops that are run by hand, on an allocator that is told what each of them allocates."""

    def __init__(self, allocated_bytes: int = 0) -> None:
        self.stats = FakeMemory(allocated_bytes)
        self.recorder = Recorder(CPU, memory=OpMemory(self.stats))

    def run(self, func: Any, *args: Any, workspace_bytes: int = 0, kept_bytes: int = 0) -> Any:
        self.recorder.before_op(facts_of(func), args, {})
        out = func(*args)
        self.stats.allocate(out.untyped_storage().nbytes() + kept_bytes)
        self.stats.allocate(workspace_bytes)
        self.stats.free(workspace_bytes)
        self.recorder.on_op(facts_of(func), args, {}, out, 1.0)
        return out


def test_durations_are_the_devices() -> None:
    """Ops carry what the device's clock says, read once at the end; the host's durations are those of launches."""
    stream = FakeStream(0.0, 2.0, 3.0, 3.5)
    recorder = Recorder(CPU, clock=DeviceClock(CPU, mark=stream.mark, synchronize=stream.synchronize))
    x = torch.ones(100)
    observe(lambda: x.exp().sin(), recorder)
    assert stream.num_waits == 0
    graph = recorder.finish()
    assert [op.seconds for op in graph.ops] == [2.0, 0.5]
    assert stream.num_waits == 1
    assert recorder.finish() == graph


def test_modelled_durations_ask_no_device() -> None:
    """Where durations are modelled nothing is measured."""
    recorder = Recorder(torch.device("cuda", 0), price=lambda *_: 0.25)
    out = torch.ones(100)
    for _ in range(2):
        recorder.before_op(facts_of(torch.ops.aten.exp.default), (out,), {})
        recorder.on_op(facts_of(torch.ops.aten.exp.default), (out,), {}, out, 9.0)
    assert [op.seconds for op in recorder.finish().ops] == [0.25, 0.25]
    assert recorder.allocator_peak_bytes is None


def test_workspaces_are_recorded() -> None:
    """Each op carries the memory that it needed beyond its inputs and outputs."""
    hand = ByHand(ROW)
    y = hand.run(torch.ops.aten.exp.default, torch.ones(100), workspace_bytes=1000)
    hand.run(torch.ops.aten.sin.default, y)
    assert [op.workspace_bytes for op in hand.recorder.finish().ops] == [1000, 0]
    assert hand.recorder.allocator_peak_bytes == 2 * ROW + 1000


def test_workspaces_of_trial_runs_are_left_to_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where convolutions try algorithms, their first call says nothing of what they need from then on."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    hand = ByHand()
    weight = torch.ones(1, 1, 3)
    convolution = torch.ops.aten.convolution.default
    x = hand.run(torch.ops.aten.exp.default, torch.ones(1, 1, 9), workspace_bytes=50)
    hand.run(convolution, x, weight, None, [1], [0], [1], False, [0], 1, workspace_bytes=1000)
    assert [op.workspace_bytes for op in hand.recorder.finish().ops] == [50, 0]


def test_storages_from_before_that_die_in_the_step() -> None:
    """In the graph a storage from before the step stays, though the step freed it."""
    hand = ByHand(2 * ROW)
    y = hand.run(torch.ops.aten.exp.default, torch.ones(100))
    hand.stats.free(ROW)
    z = hand.run(torch.ops.aten.sin.default, y)
    graph = hand.recorder.finish()
    assert (graph.storages[0].birth, graph.storages[0].death) == (-1, graph.num_ticks)
    assert z is not None


def test_other_devices_of_the_type_do_not_count() -> None:
    """In a step on cuda:0 no tensor on cuda:1 counts, nor one on the host; an op with one is never replayed."""
    recorder = Recorder(torch.device("cuda", 0), price=lambda *_: 0.0)
    copy = facts_of(torch.ops.aten._to_copy.default)
    ours, other, host = pretend_on("cuda:0"), pretend_on("cuda:1"), pretend_on("cpu")
    for source, result in ((ours, pretend_on("cuda:0")), (other, ours), (host, ours), (ours, other), (ours, host)):
        recorder.on_op(copy, (source,), {}, result, 0.0)
    graph = recorder.finish()
    assert [(len(op.inputs), len(op.outputs)) for op in graph.ops] == [(1, 1), (0, 1), (0, 1), (1, 0), (1, 0)]
    assert [op.replayable for op in graph.ops] == [True, False, False, False, False]


@pytest.mark.gpu
def test_a_recording_on_cuda() -> None:
    """On a GPU ops have the device's durations, and the step's peak is the allocator's."""
    device = torch.device("cuda", torch.cuda.current_device())
    net = nn.Linear(512, 512, device=device)
    x = torch.randn(256, 512, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    recorder = Recorder(device, net)
    observe(lambda: net(x).square().sum().backward(), recorder)
    graph = recorder.finish()
    check(graph)
    assert all(op.seconds > 0 for op in graph.ops if op.outputs)
    assert recorder.allocator_peak_bytes is not None
    assert recorder.allocator_peak_bytes >= graph.persistent_bytes


def record_knowing(step: Callable[[], object], *there: Tensor) -> tuple[set[int], StepGraph]:
    """Record a step of which live storages were scanned; what it touched of them, and the graph."""
    recorder = Recorder(CPU, there=[tensor.untyped_storage() for tensor in there])
    observe(step, recorder)
    return set(recorder.persistent_ids()), recorder.finish()


def lives(graph: StepGraph, num_bytes: int) -> list[tuple[int, int]]:
    """Births and deaths of the storages of a size."""
    return [(s.birth, s.death) for s in graph.storages if s.num_bytes == num_bytes]


def test_a_resized_storage_has_several_lives() -> None:
    """With each resize one ends and the next begins; the first of what was there before counts from the beginning."""
    x, weight = torch.ones(10), torch.ones(100)

    def step() -> None:
        x + 1.0  # tick 0
        weight.untyped_storage().resize_(0)  # 1
        x + 1.0  # 2
        weight.untyped_storage().resize_(800)  # 3
        weight + 1.0  # 4
        weight.untyped_storage().resize_(1200)  # 5

    touched, graph = record_knowing(step, x, weight)
    assert touched == {x.untyped_storage()._cdata, weight.untyped_storage()._cdata}
    assert graph.num_ticks == 6
    assert lives(graph, 800) == [(3, 6)]
    assert lives(graph, 1200) == [(5, 6)]
    assert (0, 2) in lives(graph, 400)
    assert lives(graph, 0) == [(1, 4)]
    assert graph.persistent_bytes == x.nbytes
    assert Problem(graph).base[[0, 1, 2, 3, 5]].tolist() == [480, 440, 80, 840, 2040]


def test_what_is_saved_on_a_resized_storage_is_kept_and_holds_nothing() -> None:
    """Whether it was saved before the resize or after it, and read again or not."""
    x, weight = leaf(), torch.ones(100)

    def step() -> None:
        y = x * weight
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(400)
        weight.zero_()
        z = y * weight
        results.append(z.sin())

    results: list[Tensor] = []
    _, graph = record_knowing(step, x, weight)
    of_weight = [save for save in graph.saves if save.must_keep]
    sizes = [graph.storages[graph.values[save.value].storage].num_bytes for save in of_weight]
    assert sizes == [0, 400]
    kept = {save.value for save in of_weight}
    assert not any(c.value in kept for c in Problem(graph, smallest=1).candidates.values())


def made_out_of_sight(num_elements: int) -> Tensor:
    """A tensor that no op has made."""
    storage = torch.UntypedStorage(4 * num_elements)
    return torch.empty(0).set_(storage, 0, (num_elements,)).zero_()  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_no_scan_knows_dies(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where it was first seen until its death. What is saved on it stays, unless compiled code may have made it.

    What lives on counts from before.
    """
    monkeypatch.setattr(compiled_code, "is_in_use", lambda: is_compiled)
    x, kept = leaf(), []

    def step() -> None:
        x + 1.0
        gone = made_out_of_sight(150)
        y = x * gone[:100]
        del gone, y
        x.sin()
        kept.append(made_out_of_sight(300))

    _, graph = record_knowing(step, x)
    ticks = {op.name.split(".")[1]: op.tick for op in reversed(graph.ops)}  # of the first one of each
    assert lives(graph, 600) == [(ticks["set_"], ticks["sin"] - 1)]  # the latter when `sin` saves what it reads
    assert ticks["set_"] < ticks["mul"] < ticks["sin"] - 1
    assert lives(graph, 1200) == [(-1, graph.num_ticks)]
    assert lives(graph, x.nbytes)[0] == (-1, graph.num_ticks)
    on_it = [save for save in graph.saves if graph.storages[graph.values[save.value].storage].num_bytes == 600]
    assert [save.must_keep for save in on_it] == [not is_compiled]


def test_without_a_scan_what_is_read_was_there() -> None:
    """As in a recording that nobody has counted for: what is read and was not made is older than the step."""
    x, other = leaf(), torch.ones(200)
    recorder = Recorder(CPU)
    observe(lambda: (x + 1.0, other + 1.0), recorder)
    graph = recorder.finish()
    assert graph.persistent_bytes == x.nbytes + other.nbytes
