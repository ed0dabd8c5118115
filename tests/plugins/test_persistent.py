"""State on the device that a step need not touch: counted once for each storage, kept alive by nobody."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_offload.plugins.persistent import PersistentState


def hooks() -> int:
    """How many global hooks of optimizers there are."""
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


def trained(layer: nn.Module, optimizer: Optimizer) -> None:
    """One training step."""
    layer(torch.ones(2, 10)).sum().backward()
    optimizer.step()


def test_optimizer_state_is_learnt_from_its_step() -> None:
    """Adam's two moments and its counters count from its first step on, and change the version once."""
    state = PersistentState(lambda parameters: None)
    layer = nn.Linear(10, 10)
    state.attach(layer)
    try:
        optimizer = Adam(layer.parameters())
        assert (state.version, state.optimizer_state_bytes) == (0, None)
        trained(layer, optimizer)
        assert state.version == 1
        assert state.optimizer_state_bytes == 2 * 440 + 2 * 4
        trained(layer, optimizer)
        assert state.version == 1
    finally:
        state.detach()


def test_lists_in_the_state_are_looked_into() -> None:
    """LBFGS keeps its history in lists that grow inside of one entry of the state."""
    state = PersistentState(lambda parameters: None)
    layer = nn.Linear(10, 10)
    state.attach(layer)
    try:
        optimizer = LBFGS(layer.parameters(), lr=0.1, max_iter=1, history_size=3)
        found = []
        for step in range(6):
            for p in layer.parameters():
                p.grad = torch.full_like(p, 1.0 / (1 + step))
            optimizer.step(lambda: torch.ones(()))
            found.append((state.version, state.optimizer_state_bytes))
        assert [version for version, _ in found[:4]] == [1, 2, 3, 4]
        assert found[0][1] < found[1][1] < found[2][1] < found[3][1]  # type: ignore[operator]
        assert found[4] == found[5]
    finally:
        state.detach()


def test_stateless_optimizer_has_no_state() -> None:
    """SGD without momentum adds nothing."""
    state = PersistentState(lambda parameters: None)
    layer = nn.Linear(10, 10)
    state.attach(layer)
    try:
        trained(layer, SGD(layer.parameters(), lr=0.1))
        assert state.optimizer_state_bytes == 0
    finally:
        state.detach()


def num_bytes(state: PersistentState) -> int:
    """Bytes of parameters, buffers and optimizer state, each storage once."""
    return sum({tensor.untyped_storage()._cdata: tensor.nbytes for tensor in state.tensors()}.values())


def test_parameters_buffers_and_optimizer_state_are_known() -> None:
    """They are the persistent state; gradients are not."""
    state = PersistentState(lambda parameters: None)
    net = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    state.attach(net)
    try:
        optimizer = Adam(net.parameters())
        trained(net, optimizer)
        every = sum(t.nbytes for t in (*net.parameters(), *net.buffers()))
        moments = 2 * sum(p.nbytes for p in net.parameters()) + 4 * 4
        assert num_bytes(state) == every + moments
    finally:
        state.detach()


class Unasked(nn.Parameter):
    """Ends the test where somebody asks for its gradient, as torch may end the process while a backward makes it."""

    @property
    def grad(self) -> Tensor:
        raise AssertionError("another thread's gradient was asked for")


class Idle(Optimizer):
    """Has state, and touches nothing."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moment"] = torch.zeros(100)


def test_another_threads_training_is_left_alone() -> None:
    """No gradient of what an optimizer of another thread trains is read, unless our steps train it as well."""
    ours, others = nn.Linear(10, 10), Unasked(torch.ones(100))
    state = PersistentState(lambda parameters: None)
    state.attach(ours)
    try:
        state.thread = threading.get_ident()
        for optimizer, version in ((Idle([others], {}), 0), (Idle(ours.parameters(), {}), 1)):
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()
            assert state.version == version
            assert state.gradients() == {}
            assert others.untyped_storage()._cdata in state.storages(torch.device("cpu"))
        assert state.optimizer_state_bytes == 2 * 400
    finally:
        state.detach()


def test_another_threads_training_before_the_first_step() -> None:
    """Nor of what one trains that stepped before the first step showed which thread is ours; one of ours is known."""
    ours, others, own = nn.Linear(10, 10), Unasked(torch.ones(100)), nn.Parameter(torch.ones(100))
    state = PersistentState(lambda parameters: None)
    state.attach(ours)
    try:
        ours.weight.grad, own.grad = torch.ones(10, 10), torch.ones(100)
        theirs, mine = Idle([others], {}), Idle([own], {})
        thread = threading.Thread(target=theirs.step)
        thread.start()
        thread.join()
        mine.step()
        state.thread = threading.get_ident()
        assert sum(state.gradients().values()) == 2 * 400
        thread = threading.Thread(target=theirs.step)
        thread.start()
        thread.join()
        mine.step()
        assert sum(state.gradients().values()) == 2 * 400
        assert state.optimizer_state_bytes == 400
    finally:
        state.detach()


def test_gradients_that_nobody_has_looked_at_are_in_the_scan() -> None:
    """Of what the steps train, and of what an optimizer of their thread trains."""
    state = PersistentState(lambda parameters: None)
    ours, others = nn.Linear(10, 10), nn.Linear(10, 20)
    state.attach(ours)
    try:
        optimizer = SGD(others.parameters(), lr=0.1)
        trained(others, optimizer)
        optimizer.zero_grad()
        (ours(torch.ones(2, 10)).sum() + others(torch.ones(2, 10)).sum()).backward()
        counted = state.storages(torch.device("cpu"))
        gradients = [p.grad for layer in (ours, others) for p in layer.parameters()]
        assert all(gradient.untyped_storage()._cdata in counted for gradient in gradients if gradient is not None)
        assert len(gradients) == 4
    finally:
        state.detach()


def test_gradients_are_counted_apart() -> None:
    """The gradients that are there now, by storage; none after zero_grad."""
    state = PersistentState(lambda parameters: None)
    layer = nn.Linear(10, 10)
    state.attach(layer)
    try:
        assert state.gradients() == {}
        layer(torch.ones(2, 10)).sum().backward()
        assert sorted(state.gradients().values()) == [40, 400]
        layer.zero_grad()
        assert state.gradients() == {}
    finally:
        state.detach()


def test_shared_storages_count_once() -> None:
    """Tied weights are one piece of memory."""
    state = PersistentState(lambda parameters: None)
    first, second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    second.weight = first.weight
    net = nn.Sequential(first, second)
    state.attach(net)
    try:
        assert num_bytes(state) == 400
    finally:
        state.detach()


def test_parameters_are_announced_before_their_update() -> None:
    """The callback hears of all parameters before the optimizer writes them."""
    heard: list[tuple[int, float]] = []

    def before(parameters: list[Tensor]) -> None:
        heard.append((len(parameters), float(parameters[0].detach().sum())))

    state = PersistentState(before)
    layer = nn.Linear(10, 10)
    total = float(layer.weight.detach().sum())
    state.attach(layer)
    try:
        trained(layer, SGD(layer.parameters(), lr=0.5))
    finally:
        state.detach()
    assert heard == [(2, total)]


def test_leaves_are_learnt_without_a_module() -> None:
    """Tensors that recorded steps read count where no module is given, for as long as they live."""
    state = PersistentState(lambda parameters: None)
    leaf = torch.ones(100, requires_grad=True)
    state.learn_leaves({id(leaf): weakref.ref(leaf)})
    assert num_bytes(state) == 400
    leaf.sum().backward()
    assert list(state.gradients().values()) == [400]
    del leaf
    assert num_bytes(state) == 0


def test_nothing_is_kept_alive_and_all_hooks_go() -> None:
    """Models and optimizers are known weakly; attaching twice installs the hooks once."""
    before = hooks()
    state = PersistentState(lambda parameters: None)
    layer = nn.Linear(10, 10)
    state.attach(layer)
    state.attach(layer)
    assert hooks() == before + 2
    optimizer = Adam(layer.parameters())
    trained(layer, optimizer)
    alive = [weakref.ref(layer), weakref.ref(optimizer)]
    del layer, optimizer
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert num_bytes(state) == 0
    state.detach()
    state.detach()
    assert hooks() == before


@pytest.fixture
def fake_ranks() -> Iterator[int]:
    """Four ranks that never talk, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield dist.get_world_size()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("optimizer_type", [SGD, Adam])
def test_distributed_tensors_count_by_what_this_rank_has(fake_ranks: int, optimizer_type: type[Optimizer]) -> None:
    """Parameters, buffers, gradients and optimizer state, sharded or not; each once, kept alive by nobody."""
    mesh = init_device_mesh("cpu", (fake_ranks,))
    shards = [torch.ones(8, 16), torch.ones(24)]
    layer = nn.Module()
    layer.sharded = nn.Parameter(DTensor.from_local(shards[0], mesh, [Shard(0)]))
    layer.plain = nn.Parameter(torch.ones(10))
    layer.register_buffer("shared", DTensor.from_local(shards[1], mesh, [Replicate()]))
    optimizer = optimizer_type(layer.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer_type is SGD else {}))
    state = PersistentState(lambda parameters: None)
    state.attach(layer)
    try:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        trained = shards[0].nbytes + layer.plain.nbytes
        num_moments, counters = (1, 0) if optimizer_type is SGD else (2, 2 * 4)
        assert sum(state.gradients().values()) == trained
        assert state.optimizer_state_bytes == num_moments * trained + counters
        assert state.optimizer_peak_bytes == (2 + num_moments) * trained + counters + shards[1].nbytes
        assert {shard.untyped_storage()._cdata for shard in shards} <= state.identities()
        assert state.identities() | set(state.gradients()) <= set(state.storages(torch.device("cpu")))
        assert not state.identities() & set(state.storages(torch.device("meta")))
        reference = weakref.ref(layer.sharded)
        del layer, optimizer, parameter
        gc.collect()
        assert reference() is None
    finally:
        state.detach()
