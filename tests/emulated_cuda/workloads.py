"""Small trainings that lead the stream path through its hazards; plain, they are free of races themselves.

Each takes a plugin, or None for plain training, and returns all that training left behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_offload import MemoryPlugin

NUM_STEPS = 6
Build = Callable[[], nn.Module]
Batch = Callable[[int], tuple[Tensor, Tensor]]
Run = Callable[[MemoryPlugin | None], list[Tensor]]
RUNS: dict[str, Run] = {}

# ---- models and batches


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class InPlace(nn.Module):
    """Chains of changes in place, and views of what is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(128, 256), nn.Linear(256, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h2 = torch.relu_(self.b(h))
        h3 = h2 + h
        h3.add_(h2.sigmoid())
        q = torch.tanh(h3)
        return self.c(q * h2.chunk(2, 0)[0].mean())


class Overwritten(nn.Module):
    """Writes what was saved, out of autograd's sight, while its copy is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(128, 256), nn.Linear(256, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        data = h.data
        squares = h.square()
        data.mul_(0.5)
        gates = torch.exp(-squares)
        return self.c(torch.tanh(self.b(gates)) * gates)


class OverwrittenLater(Overwritten):
    """Does so in some steps alone, whose plan counts on what was there before: a replay reads it from the host."""

    is_writing = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        squares = h.square()
        gates = torch.exp(h)
        if self.is_writing:
            h.data.mul_(0.5)
        return self.c(torch.tanh(self.b(gates)) * squares)


class EmptiedLater(OverwrittenLater):
    """Gives the memory up instead, and takes it again in backward, as sharded parameters do."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        squares = h.square()
        gates = torch.exp(h)
        out: Tensor = self.c(torch.tanh(self.b(gates)) * squares)
        if self.is_writing:
            contents = h.detach().clone()
            h.untyped_storage().resize_(0)

            def fill(_: Tensor) -> None:
                h.untyped_storage().resize_(contents.nbytes)
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(h):
                    h.copy_(contents)

            out.register_hook(fill)
        return out


class Side(nn.Module):
    """Part of it computes on a side stream of its own, beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(128, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        self.stream = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            z = torch.tanh(self.b(h)) * h
        h.record_stream(self.stream)
        w = torch.sigmoid(h) * h
        current.wait_stream(self.stream)
        z.record_stream(current)
        return self.c(z + w)


class Middle(Side):
    """The middle of it is on the side stream, and what comes back is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            z = torch.tanh(self.b(h))
            z = torch.dropout(z, 0.2, train=True) * z.exp()
            h.record_stream(self.stream)
        current.wait_stream(self.stream)
        z.record_stream(current)
        return self.c(z * torch.sigmoid(z) + h)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(128, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    )  # fmt: skip


def deep() -> nn.Module:
    return nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(128, 128), nn.Tanh())], nn.Linear(128, 10))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def _batch(*shape: int) -> Batch:
    def made(step: int) -> tuple[Tensor, Tensor]:
        dice = torch.Generator().manual_seed(step)
        x, y = torch.randn(shape, generator=dice), torch.randint(0, 10, shape[:1], generator=dice)
        return x.cuda(), y.cuda()

    return made


vectors, images, sequences = _batch(256, 128), _batch(8, 3, 32, 32), _batch(8, 32, 64)
many_vectors = _batch(2048, 128)

# ---- trainings


def step_of(memory: MemoryPlugin | None, *inputs: Tensor) -> contextlib.AbstractContextManager[Any]:
    return memory.step(*inputs) if memory is not None else contextlib.nullcontext()


class Training:
    """Models on the device, their optimizer, and what is noted of each step."""

    def __init__(self, *builds: Build) -> None:
        torch.manual_seed(0)
        self.models = [build().cuda() for build in builds]
        self.parameters = [parameter for model in self.models for parameter in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.seen: list[Tensor] = []

    def update(self, *losses: Tensor) -> None:
        """Note losses and gradients, and go on."""
        self.seen += [loss.detach().clone() for loss in losses]
        self.seen += [parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def result(self) -> list[Tensor]:
        self.seen += [parameter.detach().clone() for parameter in self.parameters]
        self.seen += [buffer.clone() for model in self.models for buffer in model.buffers()]
        self.seen.append(torch.cuda.get_rng_state())
        return [tensor.cpu() for tensor in self.seen]


def simple(name: str, build: Build, batch: Batch) -> None:
    def run(memory: MemoryPlugin | None) -> list[Tensor]:
        training = Training(build)
        for step in range(NUM_STEPS):
            x, y = batch(step)
            with step_of(memory, x, y):
                loss = functional.cross_entropy(training.models[0](x), y)
                loss.backward()
            training.update(loss)
        return training.result()

    RUNS[name] = run


def workload(function: Run) -> Run:
    RUNS[function.__name__.replace("_", " ")] = function
    return function


simple("perceptron", perceptron, vectors)
simple("convolutional", convolutional, images)
simple("transformer", Transformer, sequences)
simple("in place", InPlace, vectors)
simple("overwritten", Overwritten, vectors)
simple("side stream", Side, vectors)
simple("middle on a side stream", Middle, vectors)


def _in_later_steps(name: str, build: Callable[[], OverwrittenLater]) -> None:
    def run(memory: MemoryPlugin | None) -> list[Tensor]:
        training = Training(build)
        for step in range(2 * NUM_STEPS):
            x, y = vectors(step)
            training.models[0].is_writing = step >= NUM_STEPS
            with step_of(memory, x, y):
                loss = functional.cross_entropy(training.models[0](x), y)
                loss.backward()
            training.update(loss)
        return training.result()

    RUNS[name] = run


_in_later_steps("overwritten later", OverwrittenLater)
_in_later_steps("emptied later", EmptiedLater)


class PeakError(Exception):
    """A step held more memory than it may."""


@workload
def peaks(memory: MemoryPlugin | None) -> list[Tensor]:
    """What leaves the device takes no memory there, however late the copies are."""
    training = Training(deep)
    for step in range(2 * NUM_STEPS):
        x, y = many_vectors(step)
        training.seen = [tensor.cpu() for tensor in training.seen]  # steps whose surroundings grow are planned anew
        torch.cuda.reset_peak_memory_stats()
        limit_bytes = torch.cuda.memory_allocated() + 5 * x.nbytes  # six are saved, beside those at work
        with step_of(memory, x, y):
            loss = functional.cross_entropy(training.models[0](x), y)
            loss.backward()
        peak_bytes = torch.cuda.max_memory_allocated()
        training.update(loss)
        report = memory.report() if memory is not None else None
        planned = report.planned if report is not None and report.phase == "planned" else None
        if planned is None or not planned.plan.bound_seconds:
            continue  # plans by dice, which release when they like, know no bound
        if peak_bytes > limit_bytes:
            raise PeakError(f"{peak_bytes} bytes where {limit_bytes} are enough")
    return training.result()


@workload
def large_forward_after_a_small_one(memory: MemoryPlugin | None) -> list[Tensor]:
    """In one step, out of its plan: where host memory is short, the small one's makes room while copies use it."""
    training = Training(deep)
    for step in range(2 * NUM_STEPS):
        x, y = many_vectors(step)
        with step_of(memory, x, y):
            loss = functional.cross_entropy(training.models[0](x), y)
            loss.backward()
            losses = [loss.detach()]
            if step == NUM_STEPS:
                loss = functional.cross_entropy(training.models[0](x.repeat(8, 1)), y.repeat(8))
                loss.backward()
                losses.append(loss)
        training.update(*losses)
    return training.result()


@contextlib.contextmanager
def on_new_stream() -> Iterator[None]:
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
    torch.cuda.synchronize()


@workload
def new_stream_each_step(memory: MemoryPlugin | None) -> list[Tensor]:
    training = Training(InPlace)
    for step in range(NUM_STEPS):
        x, y = vectors(step)
        with on_new_stream():
            with step_of(memory, x, y):
                loss = functional.cross_entropy(training.models[0](x), y)
                loss.backward()
            training.update(loss)
    return training.result()


@workload
def forwards_thrown_away(memory: MemoryPlugin | None) -> list[Tensor]:
    """Graphs end while their copies are under way; their memory is used again at once."""
    training = Training(deep)
    for step in range(NUM_STEPS):
        x, y = vectors(step)
        with step_of(memory, x, y):
            for _ in range(2):
                thrown_away = training.models[0](x)
                del thrown_away
            loss = functional.cross_entropy(training.models[0](x), y)
            loss.backward()
        training.update(loss)
    return training.result()


@workload
def forwards_in_a_row(memory: MemoryPlugin | None) -> list[Tensor]:
    """Three graphs at once, and their backwards in the order of their forwards."""
    training = Training(deep)
    for step in range(NUM_STEPS):
        x, y = vectors(step)
        with step_of(memory, x, y):
            losses = [functional.cross_entropy(training.models[0](x * scale), y) for scale in (1.0, 0.5, 2.0)]
            for loss in losses:
                loss.backward()
        training.update(*losses)
    return training.result()


@workload
def micro_batches(memory: MemoryPlugin | None) -> list[Tensor]:
    """Forward and backward in turns within a step: host blocks are used again within it."""
    training = Training(deep)
    for step in range(NUM_STEPS):
        x, y = vectors(step)
        losses = []
        with step_of(memory, x, y):
            for scale in (1.0, 0.5, 2.0):
                loss = functional.cross_entropy(training.models[0](x * scale), y)
                loss.backward()
                losses.append(loss)
        training.update(*losses)
    return training.result()


@workload
def part_of_a_backward(memory: MemoryPlugin | None) -> list[Tensor]:
    """Gradients of the last layers alone in every other step: what came back for the others is thrown away."""
    training = Training(deep)
    for step in range(3 * NUM_STEPS):
        x, y = vectors(step)
        last = list(training.models[0].parameters())[-6:]
        is_part = step >= NUM_STEPS and step % 2 == 1
        if is_part:
            x, y = x[:64], y[:64]  # steps of another kind have a plan of their own
        with step_of(memory, x, y):
            loss = functional.cross_entropy(training.models[0](x), y)
            if is_part:
                training.seen += torch.autograd.grad(loss, last)
                del loss
                loss = functional.cross_entropy(training.models[0](x * 0.5), y)
            loss.backward()
        training.update(loss)
    return training.result()


class _Interrupt(torch.autograd.Function):
    is_on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _Interrupt.is_on:
            raise KeyError("interrupted")
        return gradient


class _Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 3:
                x = _Interrupt.apply(x)
        return x


@workload
def backward_interrupted(memory: MemoryPlugin | None) -> list[Tensor]:
    """An exception halfway through backward, which the user catches within the step; then it is done again."""
    training = Training(_Interrupted)
    for step in range(3 * NUM_STEPS):
        x, y = vectors(step)
        is_interrupted = step >= NUM_STEPS and step % 2 == 1
        if is_interrupted:
            x, y = x[:64], y[:64]  # steps of another kind have a plan of their own
        with step_of(memory, x, y):
            if is_interrupted:
                _Interrupt.is_on = True
                with contextlib.suppress(KeyError):
                    functional.cross_entropy(training.models[0](x), y).backward()
                _Interrupt.is_on = False
                training.optimizer.zero_grad(set_to_none=False)
            loss = functional.cross_entropy(training.models[0](x), y)
            loss.backward()
        training.update(loss)
    return training.result()


def _two_streams(
    memory: MemoryPlugin | None, *, forwards_first: bool, turn: int = -1, once_more: bool = False
) -> list[Tensor]:
    training = Training(deep, deep)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(NUM_STEPS):
        x, y = vectors(step)
        current = torch.cuda.current_stream()
        losses: list[Tensor] = []
        for stream in streams:
            stream.wait_stream(current)
        with step_of(memory, x, y):
            for model, stream in zip(training.models, streams, strict=True):
                with torch.cuda.stream(stream):
                    losses.append(functional.cross_entropy(model(x), y))
                    if not forwards_first:
                        losses[-1].backward()
            if forwards_first:
                for loss, stream in zip(losses[::turn], streams[::turn], strict=True):
                    with torch.cuda.stream(stream):
                        loss.backward()
            if once_more:
                with torch.cuda.stream(streams[0]):
                    losses.append(functional.cross_entropy(training.models[0](x * 0.5), y))
                    losses[-1].backward()
        for stream in streams:
            current.wait_stream(stream)
        training.update(*losses)
        torch.cuda.synchronize()  # the streams' memory is used by this one: let nobody have it too early
    return training.result()


@workload
def two_models_on_two_streams(memory: MemoryPlugin | None) -> list[Tensor]:
    """One after the other for the host, side by side for the device: the second has the first one's host blocks."""
    return _two_streams(memory, forwards_first=False)


@workload
def two_models_interleaved(memory: MemoryPlugin | None) -> list[Tensor]:
    """Both forwards, then both backwards: values of one stream's forward come back during the other's backward."""
    return _two_streams(memory, forwards_first=True)


@workload
def two_models_in_a_row(memory: MemoryPlugin | None) -> list[Tensor]:
    """Likewise, the first one's backward first: the other's values left later than all that it waited for."""
    return _two_streams(memory, forwards_first=True, turn=1)


@workload
def two_models_in_turns(memory: MemoryPlugin | None) -> list[Tensor]:
    """Then the first one once more, and nothing waits for the second, which still reads what the first brought back."""
    return _two_streams(memory, forwards_first=True, turn=1, once_more=True)


@workload
def two_plugins(memory: MemoryPlugin | None) -> list[Tensor]:
    """Another plugin's steps on the same device in between, with nothing that waits."""
    training, others = Training(deep), Training(deep)
    with MemoryPlugin(budget=None, policy="all-swap") if memory is not None else contextlib.nullcontext() as other:
        for step in range(NUM_STEPS):
            x, y = vectors(step)
            for each, plugin in ((training, memory), (others, other)):
                with step_of(plugin, x, y):
                    loss = functional.cross_entropy(each.models[0](x), y)
                    loss.backward()
                each.update(loss)
        return training.result() + others.result()


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether all bits are the same."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)

    return len(some) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        for a, b in zip(some, others, strict=True)
    )
