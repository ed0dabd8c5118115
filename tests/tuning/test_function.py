"""The decorator finds the size that pays, puts everything back, and calls the function once for real."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin, TuningError, UnsupportedError
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from lightning_offload.tuning import runner
from lightning_offload.tuning.function import find_efficient_batch_size
from tests.plugins.training import net, rows
from tests.tuning.trainings import Clock, Training


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of every trial, moved by the training function."""
    clock = Clock()
    real = runner.TrialSettings
    monkeypatch.setattr(
        "lightning_offload.tuning.function.TrialSettings",
        lambda **keywords: real(**{**keywords, "clock": clock}),
    )
    return clock


def test_saturating(clock: Clock) -> None:
    """On a curve that saturates, the smallest size within the tolerance is chosen, and trained with once."""
    training = Training(clock, seconds=lambda size: 1.0 + size / 100)
    train = find_efficient_batch_size(training, starting_batch_size=64, max_size=4096)
    returned = train()
    size = train.result.batch_size
    throughput = lambda size: size / (1 + size / 100)  # noqa: E731
    assert throughput(size) >= (1 - 0.05) * throughput(4096)
    assert throughput(0.75 * size) < (1 - 0.015) * throughput(4096)
    assert returned == f"trained with {size}"
    assert training.ended == [size]
    assert train.result.trials[0].batch_size == 64
    assert training.num_batches == 9 * len(train.result.trials) + 20


def test_memory_edge(clock: Clock) -> None:
    """A size that runs out of memory is no choice, however fast it would be."""
    training = Training(clock, seconds=lambda size: 10.0 + size / 100, capacity=100)
    train = find_efficient_batch_size(training, starting_batch_size=128)
    train()
    assert 85 <= train.result.batch_size <= 100
    assert {trial.is_ok for trial in train.result.trials if trial.batch_size > 100} == {False}


@pytest.mark.parametrize("follows", [True, False])
def test_predictions(clock: Clock, follows: bool) -> None:
    """Where a plugin watches, three trials fit a model that predicts the others; all count among the 12."""
    clock.tick = 1.0  # a step takes as long at any size: the largest is the best

    def train(batch_size: int) -> None:
        model, batch = net(), rows(batch_size)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        memory = ModuleMemoryPlugin("1GiB", policy="all-swap") if follows else MemoryPlugin("1GiB", policy="all-swap")
        memory.follow(model) if isinstance(memory, ModuleMemoryPlugin) else memory.attach(model)
        try:
            for _ in range(10):
                with memory.step(batch):
                    model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            memory.detach()

    tuned = find_efficient_batch_size(train, 32, max_size=128)
    tuned()
    trials = tuned.result.trials
    assert [trial.batch_size for trial in trials[:3]] == [32, 64, 16]
    assert len(trials) <= 12
    assert tuned.result.batch_size == 128
    assert all(trial.predicted_samples_per_second is None for trial in trials[:3])
    assert len(trials) > 3
    for trial in trials[3:]:
        assert trial.peak_bytes is not None
        assert trial.predicted_peak_bytes == pytest.approx(trial.peak_bytes, rel=0.01)
        assert trial.predicted_samples_per_second == pytest.approx(trial.samples_per_second, rel=0.05)


def test_first_size_too_large(clock: Clock) -> None:
    """Sizes are quartered until one fits; what has run is known to the search."""
    training = Training(clock, capacity=100)
    train = find_efficient_batch_size(training, starting_batch_size=512)
    train()
    sizes = [trial.batch_size for trial in train.result.trials]
    assert sizes[:3] == [512, 128, 32]
    assert training.sizes == [*sizes, train.result.batch_size]


def test_later_calls(clock: Clock) -> None:
    """A second call trains with the size found, without another search."""
    training = Training(clock)
    train = find_efficient_batch_size(training, 8, max_size=16)
    train()
    num_calls = len(training.sizes)
    train()
    assert training.sizes[num_calls:] == [train.result.batch_size]


def fit(batch_size: int, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> None:
    """Draws its data and its dropout from the global random state."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(12):
        loss = model(torch.randn(batch_size, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.detach())


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> list[bytes]:
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    tensors = [*losses, *model.state_dict().values(), *states, torch.get_rng_state()]
    return [tensor.numpy().tobytes() for tensor in tensors]


GLOBAL: dict[str, Any] = {}


def helper(batch_size: int) -> None:
    fit(batch_size, GLOBAL["model"], GLOBAL["optimizer"], GLOBAL["losses"])


def by_helper(batch_size: int) -> None:
    """Uses what it trains only by way of another function, from inside a comprehension."""
    [helper(each) for each in [batch_size]]


@pytest.mark.parametrize("place", ["arguments", "closure", "method", "helper", "callable", "holder"])
def test_exactly_restored(place: str, clock: Clock) -> None:
    """Training after the search equals training at that size without one, wherever models and optimizers come from."""
    model, optimizer = parts()
    losses: list[Tensor] = []
    function: Any = {
        "arguments": fit,
        "closure": lambda size: fit(size, model, optimizer, losses),
        "method": Owner(model, optimizer, losses).fit,
        "helper": by_helper,
        "callable": Owner(model, optimizer, losses),
        "holder": lambda size, owner: owner.fit(size),
    }[place]
    GLOBAL.update(model=model, optimizer=optimizer, losses=losses)
    arguments = (model, optimizer, losses) if place == "arguments" else ()
    arguments = (Owner(model, optimizer, losses),) if place == "holder" else arguments
    clock.tick = 1.0  # whatever the size: the largest is the best
    tuned_function = find_efficient_batch_size(function, 8, max_size=16, max_trials=2)
    tuned_function(*arguments)
    assert [trial.batch_size for trial in tuned_function.result.trials] == [8, 16]
    assert tuned_function.result.batch_size == 16
    del losses[:16]  # of two trials; a list is not known to be training state
    tuned = outcome(model, optimizer, losses)

    model, optimizer = parts()
    losses = []
    fit(16, model, optimizer, losses)
    assert len(losses) == 12
    assert outcome(model, optimizer, losses) == tuned


class Owner:
    """Holds what its method trains."""

    def __init__(self, *parts: Any) -> None:
        self.model, self.optimizer, self.losses = parts

    def fit(self, batch_size: int) -> None:
        fit(batch_size, self.model, self.optimizer, self.losses)

    __call__ = fit


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_restored_after_an_error(error: type[BaseException], clock: Clock) -> None:
    """What ends the search from inside the function leaves everything as it was, and another call searches anew."""
    model, optimizer = parts()
    losses: list[Tensor] = []
    before = outcome(model, optimizer, losses)
    calls = itertools.count()  # no search puts it back, as it does what the hook appends to
    clock.tick = 1.0

    def train(batch_size: int) -> None:
        fit(batch_size, model, optimizer, losses)

    def interrupted(module: nn.Module, args: object) -> None:
        if next(calls) == 13:  # in the second trial
            raise error("from inside")

    model[0].register_forward_pre_hook(interrupted)
    tuned = find_efficient_batch_size(train, 4, max_size=8, max_trials=2)
    with pytest.raises(error, match="from inside"):
        tuned()
    losses.clear()
    assert outcome(model, optimizer, losses) == before
    assert tuned.result is None
    tuned()
    assert tuned.result.batch_size in (4, 8)


def test_too_short(clock: Clock) -> None:
    """Training that ends before anything can be timed is told so, and not to raise the budget."""

    def train(batch_size: int) -> None: ...

    with pytest.raises(TuningError, match=r"`train` is too short .*: at 1, training ended after 0 optimizer steps"):
        find_efficient_batch_size(train, 4)()


def test_no_size(clock: Clock) -> None:
    """Where not even the smallest size works, the error says so."""
    with pytest.raises(TuningError):
        find_efficient_batch_size(Training(clock, capacity=0), 16)()


def test_decorator_forms() -> None:
    """It decorates with and without arguments, and keeps the function's name."""

    @find_efficient_batch_size
    def plain(batch_size: int) -> None:
        """Its docstring."""

    @find_efficient_batch_size(starting_batch_size=4)
    def with_arguments(batch_size: int) -> None: ...

    assert (plain.__name__, plain.__doc__) == ("plain", "Its docstring.")
    assert (with_arguments.__name__, with_arguments.result) == ("with_arguments", None)


def test_bad_numbers(subtests: pytest.Subtests) -> None:
    """Numbers out of range are errors when the function is decorated."""
    for keywords, message in [
        ({"starting_batch_size": 0}, "starting_batch_size=0 is not possible: give an int of at least 1"),
        ({"starting_batch_size": 1.5}, "starting_batch_size=1.5 is not possible"),
        ({"max_size": 0}, "max_size=0 is not possible"),
        ({"min_size": None}, "min_size=None is not possible"),
        ({"tolerance": float("nan")}, "tolerance=nan is not possible"),
        ({"max_size": 64}, "starting_batch_size=128 is not between min_size=1 and max_size=64"),
        ({"steps_per_trial": 0}, "steps_per_trial=0 is not possible"),
        ({"warmup_steps": -1}, "warmup_steps=-1 is not possible"),
        ({"steps_per_trial": True}, "steps_per_trial=True is not possible"),
        ({"max_trials": 0}, "max_trials=0 is not possible"),
        ({"max_trials": 2.5}, "max_trials=2.5 is not possible"),
        ({"max_seconds": 0}, "max_seconds=0 is not possible: give a positive number, or None"),
        ({"max_seconds": float("nan")}, "max_seconds=nan is not possible"),
        ({"max_seconds": "60"}, "max_seconds='60' is not possible"),
        ({"tolerance": 1}, "tolerance=1 is not possible: give a fraction between 0 and 1"),
        ({"tolerance": "3%"}, "tolerance='3%' is not possible"),
        ({"memory": "12GiB"}, "memory='12GiB' is a str: give a MemoryPlugin"),
    ]:
        with subtests.test(keywords=keywords):
            decorate: Callable[..., Any] = find_efficient_batch_size
            with pytest.raises(TuningError, match=message):
                decorate(**keywords)


def test_not_connected(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Several ranks without a process group are told to connect first."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="before the decorated function"):
        find_efficient_batch_size(Training(clock))()


def test_batch_size_given() -> None:
    """A call that gives the batch size, or misses an argument, is an error before anything is tried."""
    called: list[int] = []

    def train(batch_size: int, model: object) -> None:
        called.append(batch_size)

    for args in ((64, None), ()):
        with pytest.raises(
            TypeError, match=r"`train` cannot be called with these arguments .* leave out the batch size"
        ):
            find_efficient_batch_size(train)(*args)
    with pytest.raises(TypeError, match="takes no argument"):
        find_efficient_batch_size(lambda: None)()
    with pytest.raises(TypeError, match="which only a keyword can give"):
        find_efficient_batch_size(lambda *, batch_size: None)()
    assert called == []


def _generator(batch_size: int) -> Any:
    yield batch_size


async def _coroutine(batch_size: int) -> None: ...


async def _asynchronous_generator(batch_size: int) -> Any:
    yield batch_size


class _AsynchronousCall:
    async def __call__(self, batch_size: int) -> None: ...


def test_not_a_function(subtests: pytest.Subtests) -> None:
    """What cannot train when it is called is refused when it is decorated."""
    for function, message in [
        (64, "64 is a int, not a training function"),
        (_generator, "`_generator` does not train when it is called, it makes a generator"),
        (functools.partial(_generator), "`_generator` does not train when it is called, it makes a generator"),
        (_coroutine, "makes a coroutine"),
        (_asynchronous_generator, "makes an asynchronous generator"),
        (_AsynchronousCall(), "`_AsynchronousCall` does not train when it is called, it makes a coroutine"),
        (staticmethod(print), "write @staticmethod above the decorator"),
    ]:
        with subtests.test(function=function), pytest.raises(TuningError, match=message):
            find_efficient_batch_size(function)


class Runner:
    """Finds its batch size itself."""

    @find_efficient_batch_size(starting_batch_size=4, min_size=4, max_size=4)
    def train(self, batch_size: int, scale: float) -> tuple[int, float]:
        """Its docstring."""
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(9):
            model(torch.ones(batch_size, 2)).sum().backward()
            optimizer.step()
        return batch_size, scale


def test_methods() -> None:
    """A decorated method is called as a method, takes the batch size after `self`, and each object finds its own."""
    one, other = Runner(), Runner()
    assert one.train(0.5) == (4, 0.5)
    assert one.train.result.batch_size == 4
    assert other.train.result is None
    assert Runner.train.result is None
    assert (Runner.train.__name__, Runner.train.__doc__) == ("train", "Its docstring.")
    with pytest.raises(TypeError, match="leave out the batch size"):
        other.train(64, 0.5)


def test_nowhere_to_keep_it() -> None:
    """An object that cannot remember its size is told what to do."""

    class Slotted:
        __slots__ = ()

        @find_efficient_batch_size
        def train(self, batch_size: int) -> None: ...

    with pytest.raises(UnsupportedError, match="`train` has nowhere to keep the batch size"):
        _ = Slotted().train


def test_steps_of_fewer_rows_do_not_count(clock: Clock) -> None:
    """The last batch of an epoch, however often it comes: a step of it is no step of the trial's size."""

    def train(batch_size: int) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in [batch_size, batch_size, 1] * 6:
            clock.now += number / 8
            model(input=torch.ones(number, 2)).sum().backward()
            optimizer.step()

    tuned = find_efficient_batch_size(train, 8, min_size=8, max_size=16, warmup_steps=0)
    tuned()
    for trial in tuned.result.trials:
        assert trial.step_seconds == (trial.batch_size / 8,) * 5
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_rows_that_are_lengths_do_not_make_a_trial_longer(clock: Clock) -> None:
    """Where lengths come first, and ever shorter ones, steps count though none is as long as the first."""
    made: list[int] = []

    def train(batch_size: int) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for length in range(100, 0, -1):
            clock.now += 1.0
            model(torch.ones(length, batch_size, 2)).sum().backward()
            optimizer.step()
            made.append(length)

    find_efficient_batch_size(train, 8, min_size=8, max_size=8)()
    assert len(made) < 100 + 20


def test_a_compiled_model_is_watched_without_a_word(clock: Clock) -> None:
    """Torch warns of hooks on all modules; ours is gone before anything is compiled, and short steps are seen."""
    model = nn.Linear(2, 1)

    def train(batch_size: int) -> None:
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in [batch_size, batch_size, 1] * 6:
            clock.now += number / 8
            compiled(torch.ones(number, 2)).sum().backward()
            optimizer.step()

    tuned = find_efficient_batch_size(train, 8, min_size=8, max_size=16, warmup_steps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned()
    assert all(trial.step_seconds == (trial.batch_size / 8,) * 5 for trial in tuned.result.trials)
    torch.compiler.reset()
