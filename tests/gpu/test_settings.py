"""Exactness under the settings that people train with on GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_offload import MemoryPlugin
from tests.engine.harness import Outcome, Snapshot, Wrap, assert_same, run
from tests.gpu.cases import ACCUMULATED, SCALED, SKIPPED_STEPS, THREADED
from tests.gpu.device import CUDA_MARKS, DEVICE, MARKS, TOLERANT, deterministic
from tests.gpu.probing import Around, check_same, levels_of, plain_of, train, train_plainly, train_within
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME

pytestmark = TOLERANT

SETTINGS = ("h=0.25", "all-swap", "all-recompute")


def check(case: Case, setting: str, *, wrap: Wrap = Wrap.WHOLE, around: Around = contextlib.nullcontext) -> Outcome:
    plain = train_plainly(case, around=around)
    if setting.startswith("h="):
        budget_bytes = levels_of(case, wrap).budget(float(setting.removeprefix("h=")))
        trained = train_within(case, budget_bytes, plain=plain, wrap=wrap, around=around)
    else:
        memory = MemoryPlugin(budget=None, policy=setting)
        trained = train(case, memory, plain=plain, wrap=wrap, around=around)
    check_same(case, plain, trained, around=around)
    return trained.outcome


@pytest.fixture
def cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN choose its algorithms by trying them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = before


class TestOnAnyDevice:
    pytestmark = MARKS

    @pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
    def test_draws_of_factories_are_made_again(self, policy: str) -> None:
        """What has no tensor among its arguments draws from its device's generator, which a replay leaves as it was."""
        torch.manual_seed(0)
        weight, x = torch.randn(16, 16, device=DEVICE, requires_grad=True), torch.randn(8, 16, device=DEVICE)

        def train(step: Callable[[], contextlib.AbstractContextManager[None]]) -> list[torch.Tensor]:
            torch.manual_seed(1)
            found = []
            for _ in range(6):
                weight.grad = None
                with step():
                    hidden = torch.tanh((x @ weight) * torch.rand(8, 16, device=DEVICE))
                    (hidden * torch.randn(16, device=DEVICE)).exp().sum().backward()
                assert weight.grad is not None
                found += [weight.grad.cpu(), torch.rand(4, device=DEVICE).cpu(), torch.rand(4)]
            return found

        expected = train(contextlib.nullcontext)
        with MemoryPlugin(budget=None, policy=policy, device=DEVICE) as memory:
            found = train(lambda: memory.step(x))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))

    @pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
    def test_losses_in_chunks(self, policy: str) -> None:
        """A model's own loss in chunks is the same bits under any plan, and near the loss of all rows at once."""
        found = []
        for chunked, planned in ((False, "keep-all"), (True, "keep-all"), (True, policy)):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 500)).to(DEVICE)
            x, targets = torch.randn(512, 16, device=DEVICE), torch.randint(0, 500, (512,), device=DEVICE)
            keywords = {"chunked_loss": "2"} if chunked else {}
            with MemoryPlugin(None, policy=planned, device=DEVICE, module=model, **keywords) as memory:
                for _ in range(4):
                    model.zero_grad()
                    with memory.step(x):
                        loss = torch.nn.functional.cross_entropy(model(x).tanh() * 3.0, targets)
                        loss.backward()
            found.append([loss.detach().cpu(), *[p.grad.cpu() for p in model.parameters() if p.grad is not None]])
        for whole, kept, moved in zip(*found, strict=True):
            assert torch.equal(kept, moved)
            torch.testing.assert_close(kept, whole, rtol=1e-3, atol=1e-6)

    @pytest.mark.parametrize("wrap", list(Wrap), ids=lambda wrap: wrap.value)
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_half_precision_with_skipped_steps(self, setting: str, wrap: Wrap) -> None:
        """fp16 with a scaler, some of whose updates are skipped: the same bits, scales and skips."""
        outcome = check(SCALED, setting, wrap=wrap)
        for index in SKIPPED_STEPS:
            assert not _loss(outcome, index).isfinite()
        assert _loss(outcome, SCALED.steps - 1).isfinite()
        scales = [outcome.values[f"step{index}/scaler['scale']"] for index in range(SCALED.steps)]
        assert scales[SKIPPED_STEPS[0]] < scales[SKIPPED_STEPS[0] - 1], "the update was not skipped"

    @pytest.mark.parametrize("setting", SETTINGS)
    def test_backward_from_another_thread(self, setting: str) -> None:
        """Whoever calls backward, saved tensors are read on autograd's own thread of the device."""
        check(THREADED, setting)

    @pytest.mark.parametrize("setting", SETTINGS)
    def test_accumulation_under_autocast(self, setting: str) -> None:
        """Several micro-batches for one update, weights cast anew in each."""
        check(ACCUMULATED, setting)


def _loss(outcome: Outcome, index: int) -> torch.Tensor:
    loss = outcome.values[f"step{index}/loss"]
    assert isinstance(loss, Snapshot)
    return loss.tensor()


class TestOnCuda:
    pytestmark = CUDA_MARKS

    @pytest.mark.usefixtures("cudnn_benchmark")
    @pytest.mark.parametrize("setting", SETTINGS)
    @pytest.mark.parametrize(
        "name", ["resnet-basic", "resnet-channels-last", "resnet-bf16", "vgg-batchnorm", "densenet", "convnext"]
    )
    def test_cudnn_benchmark(self, name: str, setting: str) -> None:
        """A replay may be given another algorithm than the original: what differs is not recomputed."""
        check(BY_NAME[name], setting)

    @pytest.mark.parametrize("setting", SETTINGS)
    @pytest.mark.parametrize("name", ["resnet-basic", "gpt2-sdpa", "lstm", "dropout", "inplace-residual"])
    def test_on_a_stream_of_the_users(self, name: str, setting: str) -> None:
        """Steps run on another stream each time; the runtime looks the compute stream up."""
        check(BY_NAME[name], setting, around=_on_new_stream)

    @pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
    def test_cuda_graph_captured_in_a_step(self, policy: str) -> None:
        """What is captured is run as without the plugin, whose own copies and replays are no part of it."""
        layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)]).to(DEVICE)
        x, held = torch.ones(64, 256, device=DEVICE), torch.ones(64, 256, device=DEVICE)

        def gradients(memory: MemoryPlugin | None, index: int) -> list[torch.Tensor]:
            layers.zero_grad()
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                y = torch.tanh(layers(x))
                if index == 6:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        doubled = (held * y.detach()).tanh() * 2
                    graph.replay()
                    assert torch.equal(doubled, (held * y.detach()).tanh() * 2)
                y.sum().backward()
            return [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]

        plain = gradients(None, 0)
        with MemoryPlugin(budget=None, policy=policy) as memory:
            for index in range(9):
                assert all(map(torch.equal, gradients(memory, index), plain))

    @pytest.mark.parametrize("name", ["resnet-basic", "gpt2-sdpa", "lstm", "dropout"])
    def test_two_devices_in_one_process(self, name: str) -> None:
        """A plugin for each device, served by a thread each: neither disturbs the other."""
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        case = BY_NAME[name]
        plain = plain_of(case)
        with deterministic(warn_only=plain.has_exceptions):
            expected = {device: run(case, device=device) for device in ("cuda:0", "cuda:1")}
            found: dict[str, Outcome] = {}

            def train_on(device: str, policy: str) -> None:
                with torch.cuda.device(device):
                    found[device] = run(case, memory=MemoryPlugin(budget=None, policy=policy), device=device)

            for policy in ("all-swap", "all-recompute"):
                # First one after the other: the global generators are shared, so only that can be compared.
                for device in expected:
                    train_on(device, policy)
                    assert_same(expected[device], found.pop(device))
                threads = [threading.Thread(target=train_on, args=(device, policy)) for device in expected]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert set(found) == set(expected)


@contextlib.contextmanager
def _on_new_stream() -> Iterator[Any]:
    """Run what is inside on a stream of its own, after what came before and before what comes after."""
    stream = torch.cuda.Stream(DEVICE)
    current = torch.cuda.current_stream(DEVICE)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
