"""Models that checkpoint or offload themselves train bit for bit, and what they hold out of sight is told once."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.nested_hooks import SELECTIVE, NestedSaves, noticing
from tests.engine.harness import snapshot
from tests.engine.live_tracker import LiveStorageTracker
from tests.shares import pairs
from tests.zoo.models import hugging_face

SIDE = 128
NUM_ROWS = 512
NUM_BLOCKS = 4
NUM_STEPS = 5
"""Two of them under the final plan."""
WEIGHT_BYTES = 4 * SIDE * SIDE

RESPECTS = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")
"""Whether torch can pass what a selective checkpoint caches to the hooks around it."""


class Block(nn.Module):
    """Two layers with dropout between them, and a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.last = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        hidden = nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.2)
        out: Tensor = x + self.last(hidden)
        return out


Body = Callable[[Tensor], Tensor]


def _plainly_held(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _policy(save: CheckpointPolicy, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return save if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(body: Body, x: Tensor, save: CheckpointPolicy = CheckpointPolicy.MUST_SAVE) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, save))
    out: Tensor = checkpoint(body, x, use_reentrant=False, context_fn=contexts)
    return out


def _on_cpu(body: Body, x: Tensor) -> Tensor:
    with save_on_cpu():
        return body(x)


def _hooked(body: Body, x: Tensor) -> Tensor:
    with saved_tensors_hooks(_plainly_held, _given):
        return body(x)


def _checkpoint(body: Body, x: Tensor, **settings: Any) -> Tensor:
    out: Tensor = checkpoint(body, x, **{"use_reentrant": False, **settings})
    return out


HOW: dict[str, Callable[[Body, Tensor], Tensor]] = {
    "checkpoint": _checkpoint,
    "reentrant": lambda body, x: _checkpoint(body, x, use_reentrant=True),
    "to-the-end": lambda body, x: _checkpoint(body, x, early_stop=False),
    "nested": lambda body, x: _checkpoint(lambda x: _checkpoint(body, x.sin()) * 2, x),
    "reentrant-nested": lambda body, x: _checkpoint(lambda x: _checkpoint(body, x.sin(), use_reentrant=True) * 2, x),
    "selective": _selective,
    "selective-nested": lambda body, x: _checkpoint(lambda x: _selective(body, x.sin()) * 2, x),
    "selective-offload": functools.partial(_selective, save=CheckpointPolicy.MUST_CPU_OFFLOAD),
    "on-cpu": _on_cpu,
    "on-cpu-checkpoint": lambda body, x: _on_cpu(lambda x: _checkpoint(body, x), x),
    "checkpoint-on-cpu": lambda body, x: _checkpoint(lambda x: _on_cpu(body, x), x),
    "hooks": _hooked,
}


HIDDEN = {
    "selective": {} if RESPECTS else {SELECTIVE: 4},
    "selective-nested": {} if RESPECTS else {SELECTIVE: 4},
    "on-cpu": {"save_on_cpu": 12},
    "on-cpu-checkpoint": {"save_on_cpu": 2},
    "checkpoint-on-cpu": {"save_on_cpu": 12},
    "hooks": {"_plainly_held": 12},
}
"""What half of the blocks hold out of sight, in tensors by holder."""


class Net(nn.Module):
    """Every other block is called in a way of its own."""

    def __init__(self, how: Callable[[Body, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """All blocks, and a loss."""
        for index, block in enumerate(self.blocks):
            x = block(x) if index % 2 else self.how(block, x)
        return x.square().mean()


class Wrapped(nn.Module):
    """All blocks are wrapped by torch's own wrapper, as FSDP's users, Accelerate and Lightning do."""

    def __init__(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])
        wrappers.apply_activation_checkpointing(
            self, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
        )

    def forward(self, x: Tensor) -> Tensor:
        """All blocks, and a loss."""
        return self.blocks(x).square().mean()  # type: ignore[no-any-return]


class Language(nn.Module):
    """A transformer that checkpoints itself by its own switch."""

    def __init__(self, model: Any, **switch: Any) -> None:
        super().__init__()
        self.model = model
        model.activation_checkpointing_enable(**switch)

    def forward(self, x: Tensor) -> Tensor:
        """The loss on tokens that are read off the input's signs."""
        tokens = (x[:16, :32] > 0).long() * 3 + 1
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


_REENTRANT = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Net, how) for name, how in HOW.items()},
    "wrapper": lambda: Wrapped(wrappers.checkpoint_wrapper),
    "wrapper-reentrant": lambda: Wrapped(
        functools.partial(wrappers.checkpoint_wrapper, checkpoint_impl=wrappers.CheckpointImpl.REENTRANT)
    ),
    "wrapper-offload": lambda: Wrapped(lambda module: wrappers.offload_wrapper(wrappers.checkpoint_wrapper(module))),
    "gpt2": lambda: Language(hugging_face.gpt2("sdpa")),
    "gpt2-reentrant": lambda: Language(hugging_face.gpt2("eager"), **_REENTRANT),
    "gpt2-offload": lambda: Language(hugging_face.gpt2("sdpa"), offload=True),
    "llama-every-other": lambda: Language(hugging_face.llama(), every_n_layers=2),
}
TOLD = {
    **{name: set(holders) for name, holders in HIDDEN.items()},
    "wrapper-offload": {"save_on_cpu"},
    "gpt2-offload": {"save_on_cpu"},
}


def _step(model: nn.Module, memory: MemoryPlugin | None) -> list[bytes]:
    x = torch.randn(NUM_ROWS, SIDE, requires_grad=True)
    with memory.step(x) if memory is not None else contextlib.nullcontext():
        loss = model(x)
        loss.backward()
    gradients = [part.grad for part in (x, *model.parameters()) if part.grad is not None]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)
    model.zero_grad()
    return [snapshot(part).data for part in (loss, *gradients, torch.get_rng_state())]


def _train(build: Callable[[], nn.Module], memory: MemoryPlugin | None = None) -> tuple[list[list[bytes]], int]:
    """What some steps gave, and the bytes that live on after them."""
    torch.manual_seed(0)
    model = build()
    with LiveStorageTracker() as tracker, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*requires_grad=True.*", UserWarning)
        steps = [_step(model, memory) for _ in range(NUM_STEPS)]
        if memory is not None:
            memory.detach()
        gc.collect()
        return steps, tracker.live_bytes


def _attached(**settings: Any) -> MemoryPlugin:
    memory = MemoryPlugin(device="cpu", **settings)
    memory.attach()
    return memory


@pytest.fixture
def pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers offload to memory that is not page-locked, which needs no accelerator."""
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", lambda **_: save_on_cpu())


@pytest.mark.usefixtures("pageable")
@pytest.mark.parametrize(("name", "policy"), pairs(list(MODELS), ["all-recompute", "all-swap"], every=2))
def test_model_that_checkpoints_itself_is_exact(name: str, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Losses, gradients and random states are plain PyTorch's; what is out of sight is told once, nothing is left."""
    expected = _train(MODELS[name])
    memory = _attached(policy=policy)
    with caplog.at_level(logging.WARNING):
        assert _train(MODELS[name], memory) == expected
    told = [record.getMessage() for record in caplog.records if "no plan can move" in record.getMessage()]
    assert len(told) == len(TOLD.get(name, ()))
    assert all(any(holder in message for message in told) for holder in TOLD.get(name, ()))
    assert memory.report().num_mismatched == 0
    floor_bytes, plain_bytes = memory.report().floor_bytes, memory.report().plain_peak_bytes
    assert floor_bytes is not None
    assert plain_bytes is not None
    memory = _attached(budget=f"{(floor_bytes + plain_bytes) // 2}B")
    assert _train(MODELS[name], memory) == expected


@pytest.mark.parametrize("name", ["checkpoint", "selective"])
def test_compiled_checkpoint_is_exact(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A compiler that traces a checkpoint within a step hides nothing, and nothing is told."""

    def train(memory: MemoryPlugin | None) -> list[list[bytes]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = MODELS[name]()
        model.compile(backend="aot_eager")
        return [_step(model, memory) for _ in range(NUM_STEPS)]

    expected = train(None)
    for policy in ("all-recompute", "all-swap"):
        with _attached(policy=policy) as memory:
            assert train(memory) == expected, policy
    assert not [record for record in caplog.records if record.name.startswith("lightning_offload")]


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_is_counted(name: str) -> None:
    """The tensors that inner hooks and selective checkpoints hold are counted in forward; those of backward are not."""
    nested = NestedSaves()
    model, x = MODELS[name](), torch.randn(NUM_ROWS, SIDE, requires_grad=True)
    with saved_tensors_hooks(_own, _given), noticing(nested, _own):
        model(x).backward()
    assert nested.num_tensors == HIDDEN[name]
    sizes = [nested.num_bytes[holder] for holder in HIDDEN[name]]
    assert all(size >= number * WEIGHT_BYTES for size, number in zip(sizes, HIDDEN[name].values(), strict=True))


@pytest.mark.skipif(not RESPECTS, reason="this torch keeps what a selective checkpoint caches from all hooks")
def test_selective_checkpoint_is_planned() -> None:
    """What a selective checkpoint caches is moved like anything else, and no warning is given by torch."""
    floors = {}
    for name in ("selective", "checkpoint"):
        memory = _attached(policy="all-swap")
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            _train(MODELS[name], memory)
        floors[name] = memory.report().floor_bytes
    assert floors["selective"] == floors["checkpoint"]


def test_patches_end_with_the_step() -> None:
    """Between steps torch's own classes are as they were."""
    before = saved_tensors_hooks.__enter__
    memory = _attached(policy="all-swap")
    with memory.step():
        assert saved_tensors_hooks.__enter__ is not before
    assert saved_tensors_hooks.__enter__ is before
    assert "__enter__" not in vars(torch.utils.checkpoint._CachingTorchDispatchMode)
    memory.detach()
