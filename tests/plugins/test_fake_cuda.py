"""A step that is recorded for a GPU is the GPU's: its kernels, and what they save."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_offload.capture.cuda import autocast
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.plugins.fake import Step, record_fake, record_fake_step

A100 = device_spec("a100")
Forward = Callable[[Any, Tensor], Tensor]


def recorded(
    make: Callable[[], nn.Module],
    *shape: int,
    forward: Forward | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = "a100",
) -> StepGraph:
    """The step of a model on a batch of zeros."""

    def build() -> tuple[nn.Module, Step]:
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = make()
        finally:
            torch.set_default_dtype(previous)
        batch = torch.zeros(*shape, dtype=dtype)
        run = forward or (lambda module, data: module(data))
        return model, lambda: run(model, batch).sum().backward()

    return record_fake(build, None if device is None else device_spec(device)).graph


def names(graph: StepGraph, phase: str = "forward") -> list[str]:
    """What its ops are called, without views."""
    return [op.name.split(".")[1] for op in graph.ops if op.phase == phase and op.outputs]


def saved(graph: StepGraph) -> list[int]:
    """Bytes of what it saved."""
    return [graph.storages[graph.values[save.value].storage].num_bytes for save in graph.saves]


def first(model: nn.Module, data: Tensor) -> Tensor:
    """The output of a recurrent layer without its states."""
    out: Tensor = model(data)[0]
    return out


# ---- kernels


def test_dropout_masks_take_one_byte_an_element() -> None:
    """On a CPU they are as large as what is dropped."""
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))  # noqa: E731
    assert saved(recorded(make, 4, 8)) == [128, 32]
    assert saved(recorded(make, 4, 8, device=None)) == [128, 128]
    assert names(recorded(make, 4, 8))[:2] == ["addmm", "native_dropout"]
    assert names(recorded(make, 4, 8), "backward")[0] == "native_dropout_backward"


def test_sizes_are_handed_out_in_blocks_of_the_allocator() -> None:
    """A GPU's are 512 bytes; tensors' own sizes stay in the graph."""
    graph = recorded(lambda: nn.Linear(8, 8), 4, 8)
    assert graph.block_bytes == 512
    assert {storage.num_bytes % 512 for storage in graph.allocated().storages} == {0}
    assert recorded(lambda: nn.Linear(8, 8), 4, 8, device=None).block_bytes == 1


def test_replays_are_those_that_are_exact_on_cuda() -> None:
    """A transposed convolution is summed in any order there."""
    make = lambda: nn.ConvTranspose1d(3, 3, 3)  # noqa: E731
    (there,) = (op for op in recorded(make, 2, 3, 8).ops if op.name == "aten.convolution.default")
    (here,) = (op for op in recorded(make, 2, 3, 8, device=None).ops if op.name == "aten.convolution.default")
    assert here.replayable
    assert not there.replayable


def test_batch_norm_keeps_sums_in_float32() -> None:
    """Statistics of a batch in bfloat16, also where cuDNN would take it."""
    make = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))  # noqa: E731
    assert saved(recorded(make, 2, 3, 8, 8))[2:] == [2304, 32, 32, 32, 32, 32]
    assert saved(recorded(make, 2, 3, 8, 8, dtype=torch.bfloat16))[2:] == [1152, 16, 16, 16, 32, 32]


def test_layer_norm_keeps_sums_in_float32() -> None:
    """Mean and scale of each row, whatever the type."""
    graph = recorded(lambda: nn.LayerNorm(8), 4, 8, dtype=torch.bfloat16)
    (norm,) = (op for op in graph.ops if op.name == "aten.native_layer_norm.default")
    assert [graph.storages[graph.values[value].storage].num_bytes for value in norm.outputs] == [64, 16, 16]


def test_rms_norm_is_one_kernel() -> None:
    """It saves its input, its weight and a number for each row."""
    graph = recorded(lambda: nn.RMSNorm(8), 4, 8)
    assert names(graph)[0] == "_fused_rms_norm"
    assert "_fused_rms_norm_backward" in names(graph, "backward")
    assert saved(graph) == [128, 32, 16]


def test_rms_norm_of_channels_last_is_composed() -> None:
    """The fused kernel is for rows that lie together."""
    make = lambda: nn.RMSNorm((4, 4))  # noqa: E731
    nhwc = lambda model, data: model(data.to(memory_format=torch.channels_last))  # noqa: E731
    assert "_fused_rms_norm" in names(recorded(make, 2, 3, 4, 4))
    assert "_fused_rms_norm" not in names(recorded(make, 2, 3, 4, 4, forward=nhwc))


@pytest.mark.parametrize(
    ("make", "reserve"),
    [
        (lambda: nn.LSTM(8, 8, 2), (2 * 5 + 1) * 64 * 4 + 256),
        (lambda: nn.GRU(8, 8, 2), (2 * 6 + 1) * 64 * 4 + 256),
        (lambda: nn.RNN(8, 8), 64 * 4 + 256),
        (lambda: nn.LSTM(8, 8, batch_first=True, bidirectional=True), 5 * 128 * 4 + 256),
    ],
)
def test_recurrent_layers_are_cudnns(make: Callable[[], nn.Module], reserve: int) -> None:
    """One op, which saves cuDNN's reserve; weights and their gradients lie in one block each."""
    graph = recorded(make, 4, 2, 8, forward=first)
    kernels = [name for name in names(graph) if name not in ("zeros", "sum", "ones_like")]
    assert kernels == ["empty", "set_", "_cudnn_rnn"]  # the first two find out that the weights lie in one block
    assert names(graph, "backward") == ["_cudnn_rnn_backward"]
    assert reserve in saved(graph)
    weights = sum(parameter.numel() * 4 for parameter in make().parameters())
    assert max(storage.num_bytes for storage in graph.storages) == max(weights, reserve)
    assert sum(storage.num_bytes for storage in graph.storages if storage.is_persistent) == weights + 256


@pytest.mark.parametrize(("dtype", "num_blocks"), [(torch.float16, 1), (torch.bfloat16, 2)])
def test_weights_in_bfloat16_are_copied_into_a_block(dtype: torch.dtype, num_blocks: int) -> None:
    """At each call; the others lie in one from the start. Backward's gradients are another block."""
    graph = recorded(lambda: nn.LSTM(8, 8, 2), 4, 2, 8, forward=first, dtype=dtype)
    weights = sum(parameter.numel() * 2 for parameter in nn.LSTM(8, 8, 2).parameters())
    assert [s.num_bytes for s in graph.storages if not s.is_persistent].count(weights) == num_blocks


def test_recurrent_layers_have_arithmetic() -> None:
    """A product and a sum for each element of the matrices at each step, and twice that in backward."""

    def build() -> tuple[nn.Module, Step]:
        model = nn.LSTM(8, 8)
        return model, lambda: model(torch.zeros(4, 2, 8))[0].sum().backward()

    step = record_fake(build, A100)
    flops = {op.name: work.flops for op, work in zip(step.graph.ops, step.work, strict=True) if work.flops}
    forward = 2.0 * 8 * 512
    assert flops == {"aten._cudnn_rnn.default": forward, "aten._cudnn_rnn_backward.default": 2 * forward}


def test_cells_are_fused() -> None:
    """All but the products is one kernel."""
    lstm = recorded(lambda: nn.LSTMCell(8, 8), 2, 8, forward=first)
    gru = recorded(lambda: nn.GRUCell(8, 8), 2, 8)
    assert "_thnn_fused_lstm_cell" in names(lstm)
    assert "_thnn_fused_gru_cell" in names(gru)
    assert "_thnn_fused_gru_cell_backward" in names(gru, "backward")


# ---- attention


class Attention(nn.Module):
    """One layer of attention with four heads."""

    def __init__(self, width: int, **how: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * width, 12 * width)
        self.width, self.how = width, how

    def forward(self, data: Tensor) -> Tensor:
        """Attend within each sequence."""
        batch, length, _ = data.shape
        heads = self.linear(data).view(batch, length, 3, 4, self.width).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[2], **self.how)


@pytest.mark.parametrize(
    ("device", "dtype", "kernel", "kept"),
    [
        ("a100", torch.float32, "_scaled_dot_product_efficient_attention", [2 * 4 * 32 * 4]),  # rows of 30 as of 32
        ("a100", torch.bfloat16, "_scaled_dot_product_flash_attention", [2 * 4 * 30 * 4]),
        ("h100", torch.bfloat16, "_scaled_dot_product_flash_attention", [2 * 4 * 30 * 4]),  # stands for cuDNN's
        ("t4", torch.float16, "_scaled_dot_product_efficient_attention", [2 * 4 * 32 * 4]),
    ],
)
def test_attention_is_one_kernel_that_saves_sums(device: str, dtype: torch.dtype, kernel: str, kept: list[int]) -> None:
    """Its output and the sum of each row, beside a seed of a few bytes."""
    graph = recorded(lambda: Attention(16, is_causal=True), 2, 30, 64, dtype=dtype, device=device)
    assert kernel in names(graph)
    assert f"{kernel}_backward" in names(graph, "backward")
    size = torch.empty((), dtype=dtype).element_size()
    qkv, out = 2 * 30 * 192 * size, 2 * 30 * 64 * size
    here = [num_bytes for num_bytes in saved(graph)[1:] if num_bytes > 16]
    assert sorted(here) == sorted([qkv, qkv, qkv, out, *kept])


def test_dropout_within_attention_op_by_op_is_cudas_too() -> None:
    """It is composed in C++, where float64 has no kernel of its own."""
    graph = recorded(lambda: Attention(16, dropout_p=0.1), 2, 30, 64, dtype=torch.float64)
    assert "native_dropout" in names(graph)
    assert "bernoulli_" not in names(graph)


# ---- programs


def on_the_gpu() -> tuple[nn.Module, Step]:
    """A model that is moved to a GPU, and its batch that is made there."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda().to("cuda:0").to(0)
    with torch.device("cuda"):
        batch = torch.zeros(4, 8)
    bias = torch.ones(8, device="cuda").to("cuda", torch.float32).cuda() * torch.ones(8, device=0).to(0, torch.float32)
    return model, lambda: model(batch + bias).sum().backward()


def test_programs_may_name_the_gpu() -> None:
    """And the same ones are told so where nothing replaces it."""
    assert saved(record_fake(on_the_gpu, A100).graph) == [128, 32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_cudas(dtype: torch.dtype) -> None:
    """Products in the smaller type; norms, losses and a softmax in float32."""
    seen: list[torch.dtype] = []

    def build() -> tuple[nn.Module, Step]:
        linear, norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def step() -> None:
            with torch.autocast("cuda", dtype=dtype):
                product = linear(torch.zeros(4, 8))
                normed = norm(product)
                share = product.softmax(-1)
                loss = F.cross_entropy(linear(normed), torch.zeros(4, dtype=torch.int64)) + share.sum()
            seen.extend(tensor.dtype for tensor in (product, normed, share, loss))
            loss.backward()

        return nn.ModuleList([linear, norm]), step

    record_fake(build, A100)
    assert seen == [dtype, torch.float32, torch.float32, torch.float32]


def autocast_step(make: Callable[[], nn.Module], *shape: int, forward: Forward | None = None) -> StepGraph:
    """The step of a model in float16 by autocast."""

    def build() -> tuple[nn.Module, Step]:
        model = make()

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(torch.zeros(*shape)) if forward is None else forward(model, torch.zeros(*shape))
            out.sum().backward()

        return model, step

    return record_fake(build, A100).graph


class Function(nn.Module):
    """A function of what a linear layer makes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, data: Tensor) -> Tensor:
        """Apply it."""
        return self.function(self.linear(data))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.rms_norm(x, (8,)),
        lambda x: x.logsumexp(-1),
        lambda x: F.interpolate(x[None], scale_factor=2),
        lambda x: torch.zeros(4, 8).index_put((torch.tensor([0]),), x[0]),
        lambda x: torch.zeros(4, 8).scatter_add(0, torch.zeros(2, 8, dtype=torch.int64), x),
    ],
    ids=["rms_norm", "logsumexp", "interpolate", "index_put", "scatter_add"],
)
def test_autocast_has_float32_where_cuda_has(function: Callable[[Tensor], Tensor]) -> None:
    """Of arguments of two types the wider one counts; a CPU's autocast knows none of these."""
    seen: list[torch.dtype] = []

    def noted(x: Tensor) -> Tensor:
        seen.extend((x.dtype, function(x).dtype))
        return function(x)

    autocast_step(lambda: Function(noted), 2, 8)
    assert seen == [torch.float16, torch.float32]


def test_rms_norm_under_autocast_is_one_kernel() -> None:
    """In float32, of which its weight is too."""
    assert "_fused_rms_norm" in names(autocast_step(lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), 4, 8))


def test_autocasts_lists_are_those_of_torchs_header() -> None:
    """What a CPU's own autocast lacks of them is replaced."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text(encoding="utf-8")
    lacking = autocast.cast_on("AutocastCUDA") - autocast.cast_on("AutocastCPU")
    typed = {
        name for name in lacking if any(part.name == "dtype" for part in autocast.overload_of(name)._schema.arguments)
    }
    lists = {
        "LOWER_PRECISION_FP": autocast._IN_HALF, "FP32": lacking - autocast._IN_HALF - autocast._IN_WIDEST - typed,
        "FP32_SET_OPT_DTYPE": typed, "PROMOTE": autocast._IN_WIDEST,
    }  # fmt: skip
    for macro, ours in lists.items():
        body = header.split(f"#define AT_FORALL_{macro}(_)")[1].split("\n\n")[0]
        theirs = {
            op + (f".{overload}" if overload else "") for op, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
        }
        assert len(theirs) >= 10
        assert theirs & lacking == {name for name in ours & lacking if not name.startswith(("norm.", "cudnn_"))}


class Cell(nn.Module):
    """A recurrence, step by step."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell = make(8, 8)

    def forward(self, data: Tensor) -> Tensor:
        """The last state."""
        state: Any = None
        for step in data:
            state = self.cell(step, state)
        out: Tensor = state[0] if isinstance(state, tuple) else state
        return out


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_autocast_casts_weights_once(make: Callable[[int, int], nn.Module]) -> None:
    """However many steps a cell is called for; the next autocast casts them again."""

    def num_casts(steps: int) -> int:
        graph = autocast_step(lambda: Cell(make), steps, 2, 8)
        return sum(op.name == "aten._to_copy.default" and op.phase == "forward" for op in graph.ops)

    per_step = num_casts(2) - num_casts(1)
    assert per_step < 4
    assert num_casts(5) == num_casts(1) + 4 * per_step


def test_autocast_lays_cudnns_weights_out_in_one_block() -> None:
    """Casts of them are there once, and each has a gradient of its own type."""
    graph = autocast_step(lambda: nn.Sequential(nn.LSTM(8, 8, 2)), 4, 2, 8, forward=lambda model, x: model[0](x)[0])
    weights = sum(parameter.numel() for parameter in nn.LSTM(8, 8, 2).parameters())
    made = [storage.num_bytes for storage in graph.storages if not storage.is_persistent]
    assert made.count(2 * weights) == 2  # casts, and gradients of them
    assert names(graph).count("copy_") == 8
    assert names(graph, "backward").count("_to_copy") == 8


def test_another_threads_autocast_stays_its_own() -> None:
    """While a step is recorded, another thread's functions are cast as a CPU's are."""
    ones = torch.ones(2, 2)
    functions: list[Callable[[], Tensor]] = [
        lambda: torch.einsum("ij,jk->ik", ones, ones),
        lambda: torch.ones(2, 2, dtype=torch.bfloat16).softmax(-1),
        lambda: nn.LSTM(2, 2)(ones)[0],
    ]
    found: list[object] = []

    def elsewhere() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for function in functions:
                try:
                    found.append(function().dtype)
                except RuntimeError as error:  # CPUs without the instructions have no LSTM of this type
                    found.append(str(error))

    def build() -> tuple[nn.Module, Step]:
        thread = threading.Thread(target=elsewhere, name="elsewhere")
        thread.start()
        thread.join()
        return nn.Linear(8, 8), lambda: None

    elsewhere()
    expected, found = found, []
    assert expected[:2] == [torch.bfloat16] * 2
    record_fake(build, A100)
    assert found == expected


def test_nothing_is_left_behind() -> None:
    """After a recording torch's own functions run, also after one that failed."""
    plain = nn.Module.cuda, nn.Module.to, torch.autocast.__init__, torch.autocast.__exit__

    def fails() -> tuple[nn.Module, Step]:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        record_fake(fails, A100)
    assert (nn.Module.cuda, nn.Module.to, torch.autocast.__init__, torch.autocast.__exit__) == plain
    out = F.dropout(torch.ones(3, requires_grad=True))
    assert type(out.grad_fn).__name__ == "MulBackward0"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ones(2, 2, dtype=torch.bfloat16).softmax(-1).dtype is torch.bfloat16


# ---- plans


def test_masks_of_a_byte_make_the_plain_peak_smaller() -> None:
    """Where dropout dominates; the step is planned within half of it."""

    def build() -> tuple[nn.Module, Step]:
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Dropout(0.5))]
        model = nn.Sequential(*layers)
        return model, lambda: model(torch.zeros(4096, 64)).sum().backward()

    there = record_fake_step(build, A100)
    here = record_fake_step(build, dataclasses.replace(A100, kind="cpu"))
    plain = plan(there, A100, None).predicted_peak_bytes
    assert plain < 0.7 * plan(here, A100, None).predicted_peak_bytes
    assert plan(there, A100, plain // 2 + there.persistent_bytes).predicted_peak_bytes < plain
