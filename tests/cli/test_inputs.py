"""Example inputs are read from texts and made for a batch size."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_offload.capture.known_values import KnownValues, value_of
from lightning_offload.cli.inputs import ExampleInputs, parse_dtype, parse_inputs
from lightning_offload.errors import UnsupportedError


def test_shapes(subtests: pytest.Subtests) -> None:
    """The batch dimension is put in front; a type of its own wins over the default."""
    for text, shape, dtype in [
        ("3x224x224", (4, 3, 224, 224), torch.float16),
        ("3,8,8", (4, 3, 8, 8), torch.float16),
        ("7", (4, 7), torch.float16),
        ("int64:128", (4, 128), torch.int64),
        ("bf16:2x2", (4, 2, 2), torch.bfloat16),
        ("int64:", (4,), torch.int64),
    ]:
        with subtests.test(text=text):
            (made,) = parse_inputs([text]).build(4, torch.float16)
            assert (tuple(made.shape), made.dtype) == (shape, dtype)


def test_several_inputs() -> None:
    """They are positional in their order, or keywords where they have names."""
    first, second = parse_inputs(["3", "int64:5"]).build(2, torch.float32)
    assert (tuple(first.shape), tuple(second.shape)) == ((2, 3), (2, 5))
    named = parse_inputs(["input_ids=int64:5", "mask=5"]).build(2, torch.float32)
    assert {name: tensor.dtype for name, tensor in named.items()} == {"input_ids": torch.int64, "mask": torch.float32}


def test_a_function_of_the_batch_size() -> None:
    """What it returns is turned into FakeTensors of the same geometry, each once."""
    inputs = parse_inputs(["tests.cli.models:two_inputs"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = inputs.build(6, torch.float32)
        assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {"x": (6, 16), "mask": (6, 4)}
        assert all(isinstance(tensor, FakeTensor) for tensor in made.values())


def test_integers_of_a_function_stay_known() -> None:
    """Positions and padding masks, real or computed where tensors are fake; nothing else has contents."""
    real = {"mask": torch.ones(2, 3, dtype=torch.int64), "x": torch.ones(2, 3)}
    inputs = ExampleInputs(make=lambda batch: {**real, "places": torch.arange(3).expand(batch, -1)})
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        made = inputs.build(2, torch.float32)
        found = {name: value_of(tensor) for name, tensor in made.items()}
    assert found["x"] is None
    assert [value.tolist() for value in (found["mask"], found["places"]) if value is not None] == [
        [[1, 1, 1]] * 2, [[0, 1, 2]] * 2,
    ]  # fmt: skip


def test_the_same_tensor_twice_stays_one() -> None:
    """Labels that are the inputs themselves are not a second piece of memory."""
    inputs = parse_inputs(["tests.cli.models:one_input"])
    made = inputs.make
    assert made is not None
    same = type(inputs)(make=lambda batch: (made(batch),) * 2).build(2, torch.float32)
    assert same[0] is same[1]


def test_bad_inputs(subtests: pytest.Subtests) -> None:
    """Each error echoes the text and says what is allowed."""
    for texts, message in [
        ([], "--input is missing: write a shape without its batch dimension, such as 3x224x224"),
        (["3y224"], "--input '3y224' is not understood"),
        ([""], "--input '' is not understood"),
        (["3x0"], "--input '3x0' has a dimension of no size"),
        (["3xx3"], "--input '3xx3' has a dimension of no size"),
        (["int65:3"], "--input 'int65' is not known: choose one of float, float32"),
        (["-3x3"], "--input '-3x3' is not understood"),
        (["a=3", "4"], "--input is given with and without names"),
        (["a=3", "a=4"], "--input names an input twice: a, a"),
        (["tests.cli.models:two_inputs", "3"], "cannot go with others"),
        (["tests.cli.models:NUMBER"], "is an int: name a function of the batch size"),
        (["tests.cli.models:missing"], "has no attribute 'missing'"),
    ]:
        with subtests.test(texts=texts):
            with pytest.raises(UnsupportedError) as error:
                parse_inputs(texts)
            assert message in str(error.value)


def test_types() -> None:
    """Types go by torch's names and the usual short ones."""
    assert parse_dtype("torch.bfloat16", "--input-dtype") is torch.bfloat16
    with pytest.raises(UnsupportedError, match="--input-dtype 'int3' is not known"):
        parse_dtype("int3", "--input-dtype")
