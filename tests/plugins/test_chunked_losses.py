"""A model's own loss, computed in chunks while a plugin serves it, and as ever otherwise."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_offload import MemoryPlugin, PolicyError, UnsupportedError
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from lightning_offload.plugins.report import Report
from lightning_offload.tensors.deferred_logits import DeferredLogits

WIDTH, NUM_CLASSES, ROWS = 16, 1000, 256


class _Language(nn.Module):
    """Writes its loss as most people do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_CLASSES, WIDTH)
        blocks = [(nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Linear(16 * WIDTH, WIDTH)) for _ in range(6)]
        self.body = nn.Sequential(*[part for block in blocks for part in block])
        self.head = nn.Linear(WIDTH, NUM_CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.body(self.embedding(tokens)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1))


class _Named(_Language):
    def get_output_embeddings(self) -> nn.Module:
        return self.head


def _batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, NUM_CLASSES, (4, ROWS // 4 + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def _train(
    budget: str | None, *, chunked: bool | str = "head", num_steps: int = 6, policy: str = "auto"
) -> tuple[list[Tensor], Report | None]:
    """Losses and gradients of some steps."""
    model, found = _Language(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    memory = MemoryPlugin(budget, policy=policy, chunked_loss=chunked, module=model, device="cpu") if budget else None
    with memory if memory is not None else contextlib.nullcontext():
        for step in range(num_steps):
            with memory.step(step) if memory is not None else contextlib.nullcontext():
                _, loss = model(*_batch(step))
                assert loss is not None
                loss.backward()
            found += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
            optimizer.step()
            optimizer.zero_grad()
        return found, memory.report() if memory is not None else None


def test_less_memory_and_the_same_loss() -> None:
    """The floor is below that of the whole logits; what is trained is the same up to the order of sums."""
    expected, _ = _train(None)
    actual, chunked = _train("1GiB")
    _, whole = _train("1GiB", chunked=False)
    assert whole is not None
    assert chunked is not None
    logits_bytes = 4 * ROWS * NUM_CLASSES
    assert whole.floor_bytes is not None
    assert chunked.floor_bytes is not None
    assert whole.floor_bytes - chunked.floor_bytes > logits_bytes
    for one, other in zip(expected, actual, strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute", "auto"])
def test_plans_change_no_bit(policy: str) -> None:
    """Under any plan the bits are those of the loss in chunks without one, within the budget."""
    expected, ample = _train("1GiB", policy="keep-all")
    assert ample is not None
    assert ample.floor_bytes is not None
    assert ample.plain_peak_bytes is not None
    budget = (ample.floor_bytes + ample.plain_peak_bytes) // 2
    actual, report = _train(f"{budget}B" if policy == "auto" else "1GiB", policy=policy)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert report is not None
    assert report.measured_peak_bytes is not None
    assert policy != "auto" or report.measured_peak_bytes <= budget
    assert report.recomputed_bytes + report.swapped_bytes > 0


def test_only_in_steps() -> None:
    """Everywhere else, and afterwards, the layer is as it was."""
    model = _Named()
    forward = nn.Linear.forward
    with MemoryPlugin("1GiB", chunked_loss=True, module=model, device="cpu") as memory:
        assert type(model(_batch(0)[0])[0]) is Tensor
        with memory.step(), torch.no_grad():
            assert type(model(_batch(0)[0])[0]) is Tensor
        with memory.step():
            logits, loss = model(*_batch(0))
            assert type(logits) is DeferredLogits
            assert type(loss) is Tensor
            loss.backward()
        assert isinstance(model.head, nn.Linear)
        assert type(model.head).__name__ == "Linear"
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other.head) is nn.Linear
            assert set(vars(other.head)) == set(vars(nn.Linear(1, 1)))
        assert torch.equal(logits.detach(), model.head(model.body(model.embedding(_batch(0)[0]))).detach())
    assert type(model.head) is nn.Linear
    assert nn.Linear.forward is forward
    assert set(vars(model.head)) == set(vars(nn.Linear(1, 1)))


@pytest.mark.parametrize("adapter", ["follow", "attach"])
def test_loss_outside_of_the_model(adapter: str) -> None:
    """A loop that computes the loss itself, of what the model returns."""
    model = _Named()
    plain = _Named()
    memory = ModuleMemoryPlugin("1GiB", chunked_loss=True, module=model)
    if adapter == "follow":
        memory.follow(model, device="cpu")
    else:
        memory.attach(model, "cpu")
    for step in range(4):
        tokens, targets = _batch(step)
        losses = []
        for each in (plain, model):
            scope = memory.step() if adapter == "attach" and each is model else contextlib.nullcontext()
            with scope:
                logits, _ = each(tokens)
            losses.append(F.cross_entropy(logits.transpose(1, 2), targets))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
    memory.detach()
    torch.testing.assert_close(model.embedding.weight.grad, plain.embedding.weight.grad)


REFUSED: dict[str, tuple[Callable[[nn.Module], object], bool | str, type[Exception], str]] = {
    "no name": (lambda model: None, True, PolicyError, r"chunked_loss=True: no part of _Language says .*'head'"),
    "another name": (
        lambda model: None,
        "lm_head",
        PolicyError,
        r"'lm_head': _Language has no part .* nn.Linear is 'head'",
    ),
    "no layer": (lambda model: None, "body", UnsupportedError, r"`body`.* is Sequential with a forward of its own"),
    "a forward of its own": (
        lambda model: setattr(model.head, "forward", lambda x: x),
        "head",
        UnsupportedError,
        r"`head`.* is Linear with a forward of its own, and not an nn.Linear",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(case: str) -> None:
    """What makes logits in another way is refused as the model is attached, and nothing is left on it."""
    prepare, asked, error, message = REFUSED[case]
    model = _Language()
    prepare(model)
    memory = MemoryPlugin("1GiB", chunked_loss=asked, module=model, device="cpu")
    with pytest.raises(error, match=message):
        memory.attach()
    memory.detach()
    assert type(model.head) is nn.Linear


def test_a_model_that_cannot_be_followed_stays_as_it_was() -> None:
    """Its heads were found before its device was refused."""
    model = _Language()
    memory = ModuleMemoryPlugin("1GiB", chunked_loss="head")
    with pytest.raises(UnsupportedError, match="device 'xpu' is not supported"):
        memory.follow(model, device="xpu")
    assert type(model.head) is nn.Linear
    memory.follow(model, device="cpu")
    assert type(model.head) is not nn.Linear
    memory.detach()


def test_without_a_model() -> None:
    with pytest.raises(PolicyError, match=r"chunked_loss=True needs the model: give module="):
        MemoryPlugin("1GiB", chunked_loss=True, device="cpu").attach()
    with pytest.raises(PolicyError, match=r"chunked_loss=8 is not known: choose True or False, or name the layer"):
        MemoryPlugin("1GiB", chunked_loss=8)  # type: ignore[arg-type]


LOSSES: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "another loss": (
        lambda model, logits: -logits.log_softmax(-1)[..., 0].mean(),
        r"`head` made was read by `log_softmax`",
    ),
    "a product": (
        lambda model, logits: (logits * logits).mean(),
        r"`head` made was read by `mul` \(.*test_chunked_losses",
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_refused_where_nothing_was_chunked(case: str) -> None:
    """A first step without a loss in chunks is right, and the second says why there was none."""
    compute, why = LOSSES[case]
    model = _Language()
    with MemoryPlugin("1GiB", chunked_loss="head", module=model, device="cpu") as memory:
        with memory.step():
            compute(model, model(_batch(0)[0])[0]).backward()
        assert model.embedding.weight.grad is not None
        with (
            pytest.raises(UnsupportedError, match=rf"chunked_loss='head': the loss could not be .*{why}"),
            memory.step(),
        ):
            pass
    assert type(model.head) is nn.Linear


def test_hooks_of_the_layer() -> None:
    """They are given what it makes, as ever."""
    model = _Language()
    seen: list[type] = []
    model.head.register_forward_hook(lambda *args: seen.append(type(args[-1])))
    with MemoryPlugin("1GiB", chunked_loss="head", module=model, device="cpu") as memory:
        with memory.step():
            model(*_batch(0))[1].backward()
        with pytest.raises(UnsupportedError, match="`head` has hooks of a program's own"), memory.step():
            pass
    assert seen == [Tensor]


def test_logits_that_are_read_too() -> None:
    """A metric is right, and what it costs is told once."""
    model = _Language()
    with MemoryPlugin("1GiB", chunked_loss="head", module=model, device="cpu") as memory:
        with memory.step():
            logits, loss = model(*_batch(0))
            assert logits.argmax(-1).shape == (4, ROWS // 4)
            loss.backward()
        with (
            pytest.warns(UserWarning, match=r"all logits are computed too, for `argmax` \(.*test_chunked_losses"),
            memory.step(),
        ):
            model(*_batch(1))[1].backward()
        with memory.step():
            model(*_batch(2))[1].backward()


def _regions(model: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.flatten(0, 1)
    term: Tensor = checkpoint(lambda part: part.logsumexp(-1).square().mean(), rows, use_reentrant=False)
    return F.cross_entropy(rows, targets.flatten()) + term


def _saved(model: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
    term: Tensor = _Squares.apply(logits)  # type: ignore[no-untyped-call]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + term + logits.logsumexp(-1).square().mean()


def _head_in_a_region(model: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
    def loss_of(hidden: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden).flatten(0, 1), targets.flatten())

    hidden = model.embedding.weight[targets]
    own: Tensor = checkpoint(loss_of, hidden, use_reentrant=False)
    other: Tensor = checkpoint(loss_of, hidden, use_reentrant=True)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + own + other


def _loss_in_a_region(model: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
    """Of logits that it is not given: what backward runs again puts them off as forward does."""
    own: Tensor = checkpoint(
        lambda rows: F.cross_entropy(logits.flatten(0, 1), rows), targets.flatten(), use_reentrant=False
    )
    return own + F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return (logits * logits).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        result: Tensor = gradient * 2 * logits / logits.numel()
        return result


def test_a_region_that_is_given_the_logits_is_refused() -> None:
    """Backward would give it a tensor, of which it would save something else than forward did."""
    model = _Named()
    with MemoryPlugin("1GiB", chunked_loss="head", module=model, device="cpu") as memory:
        with memory.step():
            tokens, targets = _batch(0)
            logits = model(tokens)[0].flatten(0, 1)
            checkpoint(F.cross_entropy, logits, targets.flatten(), use_reentrant=False).backward()
        told = r"could not be computed in chunks: what `head` made was read by .*Function.* and by `cross_entropy`"
        with pytest.raises(UnsupportedError, match=told), memory.step():
            pass


@pytest.mark.parametrize("adapter", ["follow", "step"])
@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
@pytest.mark.parametrize("program", [_regions, _saved, _head_in_a_region, _loss_in_a_region])
def test_regions_and_functions(program: Callable[..., Tensor], policy: str, adapter: str) -> None:
    """What a region runs again saves the same both times; what a function saves is as the program has it."""
    found = []
    for chunked in (False, True):
        model = _Named()
        memory = ModuleMemoryPlugin("1GiB", policy=policy, chunked_loss=chunked, module=model)
        if adapter == "follow":
            memory.follow(model, device="cpu")
        else:
            memory.attach(model, "cpu")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "chunked_loss=True: the loss is computed in chunks, but")
            for step in range(4):
                model.zero_grad()
                tokens, targets = _batch(step)
                with memory.step() if adapter == "step" else contextlib.nullcontext():
                    loss = program(model, model(tokens)[0], targets)
                    loss.backward()
        memory.detach()
        found.append([loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_two_models() -> None:
    """Of one plugin, whose layers have the same name: each has its own loss."""
    models, plain = [_Named(), _Named()], [_Named(), _Named()]
    memory = ModuleMemoryPlugin("1GiB", chunked_loss=True)
    memory.follow(*models, device="cpu")
    for step in range(4):
        for number, (one, other) in enumerate(zip(models, plain, strict=True)):
            logits, loss = one(*_batch(2 * step + number))
            assert type(logits) is DeferredLogits
            loss.backward()
            other(*_batch(2 * step + number))[1].backward()
    memory.detach()
    for one, other in zip(models, plain, strict=True):
        assert type(one.head) is nn.Linear
        torch.testing.assert_close(one.embedding.weight.grad, other.embedding.weight.grad)


def test_a_layer_that_is_never_called() -> None:
    """It is told once some steps have passed."""
    model = _Language()
    with MemoryPlugin("1GiB", chunked_loss="head", module=model, device="cpu") as memory:
        for step in range(6):
            told = pytest.warns(UserWarning, match="`head` was not called in the first steps")
            with told if step == 3 else contextlib.nullcontext(), memory.step():
                model.body(model.embedding(_batch(0)[0])).sum().backward()


def test_nothing_is_left_of_what_is_refused() -> None:
    """Two layers of which one is none, another plugin's layer, and classes that others put before ours."""
    two = nn.ModuleDict({"one": _Named(), "other": _Named()})
    two["other"].head = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(UnsupportedError, match="is Sequential"), MemoryPlugin("1GiB", chunked_loss=True, module=two):
        pass
    assert type(two["one"].head) is nn.Linear
    model = _Named()
    with MemoryPlugin("1GiB", chunked_loss=True, module=model, device="cpu"):
        other = MemoryPlugin("1GiB", chunked_loss=True, module=model, device="cpu")
        with pytest.raises(UnsupportedError, match="another plugin computes the losses of `head` already"):
            other.attach()
        nn.utils.parametrizations.weight_norm(model.head)
    nn.utils.parametrize.remove_parametrizations(model.head, "weight")
    assert model(*_batch(0))[1] is not None
    nn.utils.parametrizations.weight_norm(model.head)
    with pytest.raises(UnsupportedError, match="`head`, which makes the logits, is parametrized"):
        MemoryPlugin("1GiB", chunked_loss=True, module=model, device="cpu").attach()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("keywords", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_data_parallel(keywords: dict[str, bool], is_inside: bool) -> None:
    """The wrapper finds all parameters used, wherever the loss is computed.

    A loss outside of it reads what it has put through a function of its own in some cases, which has to be computed.
    """
    gradients = []
    for chunked in (False, True):
        model = _Named()
        wrapper = DistributedDataParallel(model, **keywords)
        memory = ModuleMemoryPlugin("1GiB", chunked_loss=chunked)
        memory.follow(wrapper, device="cpu")
        for step in range(3 if is_inside or not keywords else 1):
            tokens, targets = _batch(step)
            logits, loss = wrapper(tokens, *[targets] * is_inside)
            loss = loss if is_inside else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        if chunked and keywords and not is_inside:
            with pytest.raises(UnsupportedError, match=r"`head` made was read by `torch\.autograd.Function`"):
                wrapper(_batch(1)[0])
        memory.detach()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def test_a_compiled_model() -> None:
    """In compiled code the layer's own forward runs, and that is told."""
    model = _Named()
    memory = ModuleMemoryPlugin("1GiB", chunked_loss=True, module=model)
    memory.follow(model, device="cpu")
    run = _compiled(model)
    run(*_batch(0))[1].backward()
    with pytest.raises(UnsupportedError, match="could not be computed in chunks: `head` runs in compiled code"):
        run(*_batch(1))
    memory.detach()
