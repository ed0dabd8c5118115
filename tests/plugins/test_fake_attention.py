"""Steps with masks, packed sequences or flex attention are recorded as a GPU runs them: nothing more is square."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from examples.models.registry import default_dtype
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.plugins.fake import Step, record_fake, record_fake_step
from tests.capture.recording import record
from tests.zoo.models import hugging_face

H100 = device_spec("h100")
LENGTH = 80
Batch = dict[str, Tensor]


def ids() -> Tensor:
    """Two sequences."""
    return torch.zeros(2, LENGTH, dtype=torch.int64)


def plain() -> Batch:
    """Ids alone."""
    return {"input_ids": ids()}


def unpadded() -> Batch:
    """A padding mask without padding."""
    return {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}


def padded() -> Batch:
    """A padding mask with some."""
    return {"input_ids": ids(), "attention_mask": (torch.arange(LENGTH) > 3).expand(2, -1).to(torch.int64)}


def packed() -> Batch:
    """Four sequences a row."""
    return {"input_ids": ids(), "position_ids": (torch.arange(LENGTH) % (LENGTH // 4)).expand(2, -1)}


def counted() -> Batch:
    """Positions that say what is so without them."""
    return {"input_ids": ids(), "position_ids": torch.arange(LENGTH).expand(2, -1)}


def unknown() -> Batch:
    """A padding mask of which nothing is known."""
    return {"input_ids": ids(), "attention_mask": torch.empty_like(ids())}


def llama_step(batch: Callable[[], Batch], dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Step]:
    """A Llama and its step."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        model = hugging_face.llama()
    inputs = batch()

    def step() -> None:
        model(**inputs, labels=inputs["input_ids"]).loss.backward()

    return model.train(), step


def squares(graph: StepGraph) -> list[int]:
    """Sizes of what holds a number for each pair of a query and a key."""
    return [storage.num_bytes for storage in graph.storages if storage.num_bytes in SQUARES]


SQUARES = {2 * LENGTH * LENGTH * size for size in (1, 2, 4)}


@pytest.mark.parametrize("batch", [plain, unpadded, counted])
def test_a_mask_that_says_nothing_is_not_there(batch: Callable[[], Batch]) -> None:
    """Models of transformers leave it out where they can look at it: attention is causal by itself."""
    graph = record_fake(lambda: llama_step(batch), H100).graph
    assert squares(graph) == []
    assert not any(op.name == "aten.where.self" for op in graph.ops)


@pytest.mark.parametrize("batch", [padded, packed, unknown])
def test_a_mask_that_says_something_is_there(batch: Callable[[], Batch]) -> None:
    """Each layer saves it in the type that is computed in, as on a GPU."""
    graph = record_fake(lambda: llama_step(batch), H100).graph
    saved = [graph.storages[graph.values[save.value].storage].num_bytes for save in graph.saves]
    assert saved.count(2 * 2 * LENGTH * LENGTH) == 2


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("batch", [plain, padded, packed])
def test_the_real_step_is_the_recorded_one(batch: Callable[[], Batch]) -> None:
    """On a CPU: the same ops and the same saved tensors, so that the peaks of the plan are those of the training."""
    model, step = llama_step(batch, torch.float32)
    real = record(step, model)
    assert record_fake(lambda: llama_step(batch, torch.float32)).graph.digest() == real.digest()


def test_transformers_is_left_as_it_was() -> None:
    """Its question whether a tensor is fake is answered by itself again."""
    module: Any = importlib.import_module("transformers.utils.import_utils")
    before = module.is_fake_tensor
    record_fake(lambda: llama_step(plain))
    assert module.is_fake_tensor is before


class Flex(nn.Module):
    """One layer of flex attention with four heads, of which two share one of keys."""

    def __init__(self, attend: Callable[..., Tensor], width: int = 64, **how: Any) -> None:
        super().__init__()
        self.project, self.attend, self.width, self.how = nn.Linear(width, 2 * width), attend, width, how

    def forward(self, data: Tensor) -> Tensor:
        """Attend causally."""
        batch, length, _ = data.shape
        query, key, value = self.project(data).split([self.width, self.width // 2, self.width // 2], -1)
        heads = [item.view(batch, length, -1, 16).transpose(1, 2) for item in (query, key, value)]
        mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, length, length, device="cpu")
        return self.attend(*heads, block_mask=mask, enable_gqa=True, **self.how)


def flex_step(make: Callable[[], nn.Module], length: int) -> Callable[[], tuple[nn.Module, Step]]:
    """A step of a layer with flex attention."""

    def build() -> tuple[nn.Module, Step]:
        model = make()
        return model, lambda: model(torch.zeros(2, length, 64)).sum().backward()

    return build


def compiled() -> nn.Module:
    """The layer with a compiled function, and with a bias."""
    attend: Any = torch.compile(flex_attention)
    return Flex(attend, score_mod=lambda score, _b, head, q, k: score + (q - k) * 0.1 * head)


def compiled_whole() -> nn.Module:
    """The layer, compiled itself."""
    model = Flex(flex_attention)
    model.compile()
    return model


@pytest.mark.parametrize("make", [compiled, compiled_whole])
def test_flex_attention_is_one_kernel(make: Callable[[], nn.Module]) -> None:
    """It saves its inputs, its output and the sum of each row; nothing that it reads counts as written."""
    graph = record_fake(flex_step(make, 256), H100).graph
    (kernel,) = (op for op in graph.ops if op.name == "flex_attention")
    sizes = [graph.storages[graph.values[value].storage].num_bytes for value in kernel.outputs]
    assert sizes == [2 * 256 * 64 * 4, 2 * 4 * 256 * 4, 2 * 4 * 256 * 4]
    saved = {graph.values[save.value].storage for save in graph.saves}
    assert {graph.values[value].storage for value in kernel.outputs[:2]} <= saved
    (backward,) = (op for op in graph.ops if op.name == "flex_attention_backward")
    made = [graph.storages[graph.values[value].storage].num_bytes for value in backward.outputs]
    assert made == [2 * 256 * 64 * 4, 2 * 256 * 32 * 4, 2 * 256 * 32 * 4]


def test_flex_attention_is_priced_as_attention() -> None:
    """Two products in forward and five in backward, over half of the pairs where there is a mask."""
    step = record_fake(flex_step(compiled, 256), H100)
    flops = {op.name: work.flops for op, work in zip(step.graph.ops, step.work, strict=True) if "flex" in op.name}
    product = 2 * 4 * 256 * 256 * (16 + 16) / 2
    assert flops == {"flex_attention": 2 * product, "flex_attention_backward": 5 * product}


def test_flex_attention_that_is_not_compiled_is_refused() -> None:
    """On a GPU it is another program, which has all scores at once."""
    with pytest.raises(UnsupportedError, match=r"call torch\.compile\(flex_attention\)"):
        record_fake(flex_step(lambda: Flex(flex_attention), 256), H100)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):  # torch's own again
        Flex(flex_attention)(torch.zeros(2, 256, 64))


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # of transformers
def test_a_packed_llama_with_flex_attention_grows_with_its_length() -> None:
    """Twice the tokens take twice the memory, the mask's blocks included; masks for SDPA make it four times."""

    def peak(attention: str, length: int) -> int:
        def build() -> tuple[nn.Module, Step]:
            model: Any = hugging_face.llama()
            model.config._attn_implementation = attention
            tokens = torch.zeros(1, length, dtype=torch.int64)
            places = (torch.arange(length) % 128)[None]
            return model, lambda: model(tokens, position_ids=places, labels=tokens).loss.backward()

        graph = record_fake_step(build, H100)
        return plan(graph, H100, None).plain_peak_bytes - graph.persistent_bytes

    assert peak("flex_attention", 4096) < 2.02 * peak("flex_attention", 2048)
    assert peak("sdpa", 4096) > 3 * peak("sdpa", 2048)


def test_compiled_models_are_recorded_op_by_op() -> None:
    """A compiler cannot run on what is fake; what is not compiled gives the same graph."""

    def build(*, is_compiled: bool) -> tuple[nn.Module, Step]:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        call: Any = torch.compile(model) if is_compiled else model
        return model, lambda: call(torch.zeros(4, 8)).sum().backward()

    graphs = [record_fake(lambda c=c: build(is_compiled=c), H100).graph for c in (False, True)]
    assert graphs[0].digest() == graphs[1].digest()
