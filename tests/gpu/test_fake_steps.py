"""A step that was recorded for a GPU without one is the step that runs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_offload.capture.recorder import Recorder
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.fake import Step, record_fake
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.tiers import Tiers
from tests.gpu.device import CUDA_MARKS, DEVICE, IS_EMULATED, TOLERANT
from tests.plugins.test_fake_cuda import Attention, Cell, Function
from tests.runtime.inline import inline_lanes

pytestmark = [
    *CUDA_MARKS,
    TOLERANT,
    pytest.mark.skipif(IS_EMULATED, reason="the emulated device runs a CPU's kernels"),
]


class First(nn.Module):
    """The output of a recurrent layer without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, data: Tensor) -> Tensor:
        """Leave the states out."""
        out: Tensor = self.layer(data)[0]
        return out


def share_keys(data: Tensor) -> Tensor:
    """Attention of four heads, with keys and values of two."""
    query, key = data.view(2, 4, 8, 8), data.view(2, 4, 8, 8)[:, :2]
    return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)


def softmax(data: Tensor) -> Tensor:
    """In float32."""
    return data.softmax(-1, dtype=torch.float32)


def norm_channels_last(data: Tensor) -> Tensor:
    """RMS norm of images."""
    return F.rms_norm(data.view(2, 4, 4, 8).to(memory_format=torch.channels_last), (4, 8))


def enlarge(data: Tensor) -> Tensor:
    """Each number twice."""
    return F.interpolate(data[None], scale_factor=2)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch, their type, and what autocast makes of it."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None


FOR_ANOTHER = {
    "aten.cudnn_batch_norm.default": "aten.native_batch_norm.default",
    "aten._scaled_dot_product_cudnn_attention.default": "aten._scaled_dot_product_flash_attention.default",
}
"""Kernels for which another stands, which saves the same but for seeds and empty reserves."""
CASES = (
    Case("dropout", lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)), (32, 64)),
    Case("batch norm", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (4, 3, 16, 16)),
    Case("layer norm, half", lambda: nn.LayerNorm(64), (32, 64), torch.bfloat16),
    Case("RMS norm", lambda: nn.RMSNorm(64), (32, 64)),
    Case("attention", lambda: Attention(16, is_causal=True), (2, 30, 64)),
    Case("attention, half", lambda: Attention(64, is_causal=True), (2, 30, 256), torch.bfloat16),
    Case("attention with dropout, half", lambda: Attention(64, dropout_p=0.1), (2, 30, 256), torch.bfloat16),
    Case("LSTM", lambda: First(nn.LSTM(64, 64, 2)), (20, 8, 64)),
    Case("GRU of both directions", lambda: First(nn.GRU(64, 64, 2, bidirectional=True)), (20, 8, 64)),
    Case("RNN", lambda: First(nn.RNN(64, 64)), (20, 8, 64)),
    Case("LSTM cell", lambda: First(nn.LSTMCell(64, 64)), (8, 64)),
    Case("GRU cell", lambda: nn.GRUCell(64, 64), (8, 64)),
    Case("LSTM, bfloat16", lambda: First(nn.LSTM(64, 64, 2)), (20, 8, 64), torch.bfloat16),
    Case("LSTM cell, autocast", lambda: Cell(nn.LSTMCell), (5, 2, 8), autocast=torch.float16),
    Case("keys that heads share", lambda: Function(share_keys), (64, 8)),
    Case("keys that heads share, half", lambda: Function(share_keys), (64, 8), torch.bfloat16),
    Case("softmax of bfloat16 in float32", lambda: Function(softmax), (32, 8), torch.bfloat16),
    Case("RMS norm, channels last", lambda: Function(norm_channels_last), (32, 8)),
    Case("RMS norm, autocast", lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), (32, 8), autocast=torch.bfloat16),
    Case("logsumexp, autocast", lambda: Function(lambda x: x.logsumexp(-1)), (32, 8), autocast=torch.float16),
    Case("interpolation, autocast", lambda: Function(enlarge), (32, 8), autocast=torch.float16),
)


def build_on(device: torch.device, case: Case) -> tuple[nn.Module, Step]:
    """The model there, and its step."""
    with device:
        previous = torch.get_default_dtype()
        torch.set_default_dtype(case.dtype)
        try:
            model = case.make()
        finally:
            torch.set_default_dtype(previous)
        batch = torch.zeros(case.shape, dtype=case.dtype)

    def step() -> None:
        with torch.autocast("cuda", dtype=case.autocast, enabled=case.autocast is not None):
            out = model(batch)
        out.sum().backward()

    return model, step


def recorded(case: Case) -> StepGraph:
    """The step as it runs on the GPU, not its first one; all that it saves stays there."""
    model, step = build_on(DEVICE, case)
    step()
    model.zero_grad()
    recorder = Recorder(DEVICE, model)
    executor = StepExecutor(
        device=DEVICE,
        tiers=Tiers(inline_lanes(), HostPool(budget_bytes=0)),
        program=None,
        observer=recorder,
        verifier=None,
    )
    with executing(executor):
        step()
    return recorder.finish()


def saved(graph: StepGraph) -> list[int]:
    """Bytes of what it saved, without seeds and empty reserves."""
    sizes = [graph.storages[graph.values[save.value].storage].num_bytes for save in graph.saves]
    return [num_bytes for num_bytes in sizes if num_bytes > 16]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fake_step_is_that_of_the_gpu(case: Case) -> None:
    """The ops of its forward, and what they save, to the byte but for seeds."""
    major, minor = torch.cuda.get_device_capability(DEVICE)
    spec = dataclasses.replace(device_spec("a100"), compute_capability=10 * major + minor)
    fake = record_fake(lambda: build_on(torch.device("cpu"), case), spec).graph
    there = recorded(case)
    names = [
        [FOR_ANOTHER.get(op.name, op.name) for op in graph.ops if op.phase == "forward"] for graph in (fake, there)
    ]
    assert names[0] == names[1]
    assert saved(fake) == saved(there)
    assert fake.block_bytes == there.block_bytes
