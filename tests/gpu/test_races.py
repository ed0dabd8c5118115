"""However far streams get out of step, and whatever is written to released memory, the bits stay the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.stream_lanes import StreamLanes
from tests.engine.harness import differences
from tests.fuzz.running import random_planner
from tests.gpu.device import (
    ARE_COPIES_FIRST,
    CUDA_MARKS,
    IS_AHEAD,
    IS_CUDA,
    IS_EMULATED,
    MARKS,
    TOLERANT,
    take_races,
)
from tests.gpu.probing import Plain, Trained, check_same, plain_of, train
from tests.gpu.streams import Lane, poisoned, slowed, without_waiting
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME

pytestmark = TOLERANT

NAMES = (
    "resnet-basic", "resnet-bf16", "gpt2-sdpa", "lstm", "dropout", "inplace-residual", "views-of-one-storage",
    "indices", "accumulation", "custom-function",
)  # fmt: skip
SLOW: tuple[tuple[Lane, ...], ...] = (("out",), ("in",), ("compute",), ("out", "in", "compute"))
SEEDS = (1, 2)


@contextlib.contextmanager
def randomly_planned(seed: int) -> Iterator[MemoryPlugin]:
    """A plugin whose plans come from dice."""
    with mock.patch("lightning_offload.planning.planner.plan", random_planner(seed)):
        yield MemoryPlugin(budget=None, policy="all-swap", verify=("first", "never", "always")[seed % 3])


def train_randomly(case: Case, plain: Plain, seed: int) -> Trained:
    with randomly_planned(seed) as memory:
        return train(case, memory, plain=plain)


class TestOnAnyDevice:
    pytestmark = MARKS

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("lanes", SLOW, ids="+".join)
    def test_slow_streams_under_random_plans(self, lanes: tuple[Lane, ...], name: str) -> None:
        """A sleeping kernel in front of copies, or on compute around its meetings with them, changes nothing."""
        case = BY_NAME[name]
        plain = plain_of(case)
        for seed in SEEDS:
            with slowed(lanes, seed=seed) as counts:
                trained = train_randomly(case, plain, seed)
            check_same(case, plain, trained)
        assert all(counts[lane] for lane in lanes if IS_CUDA or lane != "compute"), counts

    @pytest.mark.parametrize("policy", ["all-swap", "random"])
    @pytest.mark.parametrize("name", NAMES)
    def test_released_memory_is_read_by_nobody(self, name: str, policy: str) -> None:
        """Device and host memory is overwritten as soon as it is given back, with slow lanes in both directions."""
        case = BY_NAME[name]
        plain = plain_of(case)
        with poisoned() as counts, slowed(("out", "in"), seed=3):
            if policy == "random":
                trained = train_randomly(case, plain, 4)
            else:
                trained = train(case, MemoryPlugin(budget=None, policy=policy), plain=plain)
        check_same(case, plain, trained)
        assert counts["device"] > 0
        # Dice may hold on to all host memory of a small model, and a host may be ahead of all copies.
        is_sure = policy == "all-swap" and not IS_AHEAD
        assert counts["host"] > 0 or not is_sure, "host memory was given back, and no copy was to come"


class TestOnCuda:
    pytestmark = CUDA_MARKS

    def test_a_runtime_that_does_not_wait_is_noticed(self) -> None:
        """The sleeping kernels do what they are for: without the waits results differ, or accesses race at least."""
        case = BY_NAME["inplace-residual"]
        plain = plain_of(case)
        with without_waiting(), slowed(("in",), seed=5, share=1.0), poisoned():
            trained = train(case, MemoryPlugin(budget=None, policy="all-swap"), plain=plain)
        assert take_races() or not IS_EMULATED
        assert differences(plain.outcome, trained.outcome) or ARE_COPIES_FIRST

    @pytest.mark.parametrize("policy", ["all-swap", "all-recompute", "keep-all"])
    def test_memory_of_another_stream_is_read_by_nobody_once_it_is_released(self, policy: str) -> None:
        """An activation is made on the program's side stream and saved on the main one, which is behind the host."""
        side, device = torch.cuda.Stream(), torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(0)
        weight, x = torch.nn.Parameter(torch.randn(1 << 18, device=device)), torch.randn(1 << 18, device=device)

        def step(memory: MemoryPlugin | None) -> torch.Tensor:
            main = torch.cuda.current_stream()
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    y = x * 2.0
                main.wait_stream(side)
                for _ in range(20):
                    torch.mm(x.view(512, 512), x.view(512, 512))  # main falls behind
                a = y * weight
                b = a.sin()
                del y, a
                with torch.cuda.stream(side):
                    other = torch.full_like(x, 7.0)
                b.sum().backward()
                main.wait_stream(side)
                del other
            torch.cuda.synchronize()
            gradient = weight.grad
            assert gradient is not None
            weight.grad = None
            return gradient.cpu()

        expected = step(None)
        with MemoryPlugin(budget=None, policy=policy, device=device) as memory:
            for _ in range(6):
                assert torch.equal(step(memory), expected)
        assert not take_races()

    @pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
    def test_each_reader_waits_for_what_filled_the_memory(self, policy: str) -> None:
        """Two streams have saved one activation, and read it in their backwards; neither waits for the other."""
        streams, device = [torch.cuda.Stream(), torch.cuda.Stream()], torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(1 << 18, device=device)) for _ in streams]
        x = torch.randn(1 << 18, device=device)

        def step(memory: MemoryPlugin | None) -> list[torch.Tensor]:
            main = torch.cuda.current_stream()
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                y = (x * 2.0).sin()
                losses = []
                for stream, weight in zip(streams, weights, strict=True):
                    stream.wait_stream(main)
                    with torch.cuda.stream(stream):
                        losses.append((y * weight).sum())
                del y
                for stream in streams:
                    main.wait_stream(stream)
                sum(losses).backward()  # type: ignore[union-attr]
            torch.cuda.synchronize()
            gradients = [weight.grad.cpu() for weight in weights if weight.grad is not None]
            for weight in weights:
                weight.grad = None
            return gradients

        expected = step(None)
        for seed in SEEDS:
            with (
                slowed(("in",), seed=seed, share=1.0),
                poisoned(),
                MemoryPlugin(policy=policy, device=device) as memory,
            ):
                for _ in range(6):
                    assert all(map(torch.equal, step(memory), expected))
        assert not take_races()

    def test_what_leaves_late_leaves_behind_who_saved_it(self) -> None:
        """A step of another structure saves on its own stream, then on the main one before that waits."""
        side, device = torch.cuda.Stream(), torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(0)
        weight, x = torch.nn.Parameter(torch.randn(1 << 18, device=device)), torch.randn(1 << 18, device=device)

        def step(memory: MemoryPlugin | None, *, is_other: bool) -> torch.Tensor:
            main = torch.cuda.current_stream()
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    for _ in range(20):
                        torch.mm(x.view(512, 512), x.view(512, 512))  # side falls behind
                    z = weight.exp()  # saves this alone: a second save here would make copies wait for the first
                first = (x * weight).cos()
                if is_other:
                    first = first.tanh()
                main.wait_stream(side)
                loss = (first + z).sum()
                del z, first
                loss.backward()
            torch.cuda.synchronize()
            gradient = weight.grad
            assert gradient is not None
            weight.grad = None
            return gradient.cpu()

        kinds = [*[False] * 4, *[True, False] * 4]
        expected = {kind: step(None, is_other=kind) for kind in (False, True)}
        with MemoryPlugin("9MiB", policy="all-swap", device=device) as memory:
            for kind in kinds:
                assert torch.equal(step(memory, is_other=kind), expected[kind])
            assert memory.report().num_aligned > 0
        assert not take_races()

    def test_every_copy_is_timed(self) -> None:
        """Times wait for the events that tell them, which come later than the copies are known to be done."""
        mover, num_bytes = StreamLanes(torch.device("cuda", torch.cuda.current_device())), 4096
        host = torch.zeros(2, num_bytes, dtype=torch.uint8).pin_memory()
        source, target = [torch.zeros(num_bytes, dtype=torch.uint8, device=mover.device) for _ in range(2)]
        mover.measure(True)
        for _ in range(3):
            mover.to_host(mover.mark(), source.untyped_storage(), 0, num_bytes, host[0].data_ptr())
            mover.to_device(mover.mark(), target.untyped_storage(), 0, num_bytes, host[1].data_ptr()).wait()
        times = mover.take_times()
        assert (times.out_bytes, times.in_bytes) == (3 * num_bytes, 3 * num_bytes)
