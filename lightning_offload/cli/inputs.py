"""Example inputs of a step, as ``--input`` gives them: shapes, or a function that makes them.

``[NAME=][DTYPE:]SHAPE``, such as ``3x224x224``, ``int64:128``, ``labels=int64:`` (one label a sample): the batch
dimension is put in front. Or ``MODULE:FUNCTION``: called with the batch size, it returns one tensor, a tuple of
positional inputs or a dict of keyword inputs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_offload.capture.known_values import tell, value_of
from lightning_offload.cli.loading import load_attribute
from lightning_offload.errors import UnsupportedError, type_of

_SPEC = re.compile(r"(?:([A-Za-z_]\w*)=)?(?:([a-z_]+[0-9]*):)?([0-9x,]*)")
_FACTORY = re.compile(r"[\w./\-]+:[A-Za-z_][\w.]*")
_DTYPES = {
    "float": torch.float32, "float32": torch.float32, "fp32": torch.float32,
    "float16": torch.float16, "half": torch.float16, "fp16": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float64": torch.float64, "double": torch.float64,
    "int64": torch.int64, "long": torch.int64, "int32": torch.int32, "int": torch.int32, "int16": torch.int16,
    "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool, "complex64": torch.complex64,
}  # fmt: skip
_HELP = "write a shape without its batch dimension, such as 3x224x224 or int64:128, or MODULE:FUNCTION"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor: its keyword if it has one, its type (None for the default) and its shape without the batch."""

    name: str | None
    dtype: torch.dtype | None
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """What a step is given.

    Attributes:
        specs: The tensors, if they are given by shapes.
        make: Makes them for a batch size, if a function does.
    """

    specs: tuple[TensorSpec, ...] = ()
    make: Callable[[int], Any] | None = None

    def build(self, batch_size: int, default: torch.dtype) -> Any:
        """The inputs for a batch size: a dict if they have names, else a tuple; what the function returns otherwise.

        Call it under FakeTensorMode: contents are left undefined.

        Args:
            batch_size: Samples in the batch.
            default: Type of the tensors that name none.
        """
        if self.make is not None:
            made_by_caller = self.make(batch_size)
            fakes: dict[int, Tensor] = {}  # labels are often the inputs themselves
            return tree_map_only(Tensor, lambda t: fakes.setdefault(id(t), fake_like(t)), made_by_caller)
        made = [torch.empty((batch_size, *spec.shape), dtype=spec.dtype or default) for spec in self.specs]
        if self.specs and self.specs[0].name is not None:
            return {spec.name: tensor for spec, tensor in zip(self.specs, made, strict=True)}
        return tuple(made)


def fake_like(tensor: Tensor) -> Tensor:
    """A tensor of the same geometry, on the CPU and without memory under FakeTensorMode; small integers stay known."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    tell(made, value_of(tensor))
    return made.requires_grad_(tensor.requires_grad)


def parse_inputs(texts: Sequence[str]) -> ExampleInputs:
    """Read all that ``--input`` gave.

    Raises:
        UnsupportedError: One is malformed, or they do not go together.
    """
    if not texts:
        raise UnsupportedError(f"--input is missing: {_HELP}")
    if any(_is_factory(text) for text in texts):
        if len(texts) > 1:
            raise UnsupportedError(f"--input {texts[0]!r} cannot go with others: the function makes all inputs")
        make = load_attribute(texts[0], "--input")
        if not callable(make):
            raise UnsupportedError(f"--input {texts[0]!r} is {type_of(make)}: name a function of the batch size")
        return ExampleInputs(make=make)
    specs = tuple(_parse(text) for text in texts)
    if len({spec.name is None for spec in specs}) > 1:
        raise UnsupportedError("--input is given with and without names: name all inputs, or none")
    names = [spec.name for spec in specs if spec.name is not None]
    if len(set(names)) < len(names):
        raise UnsupportedError(f"--input names an input twice: {', '.join(names)}")
    return ExampleInputs(specs=specs)


def parse_dtype(text: str, option: str) -> torch.dtype:
    """Read the name of a type.

    Raises:
        UnsupportedError: There is none of that name.
    """
    name = text.strip().lower().removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedError(f"{option} {text!r} is not known: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _is_factory(text: str) -> bool:
    return _SPEC.fullmatch(text) is None and _FACTORY.fullmatch(text) is not None


def _parse(text: str) -> TensorSpec:
    match = _SPEC.fullmatch(text.strip())
    if match is None or (not match[2] and not match[3]):
        raise UnsupportedError(f"--input {text!r} is not understood: {_HELP}")
    name, dtype, shape = match.groups()
    sizes = re.split("[x,]", shape) if shape else []
    if "" in sizes or any(int(size) == 0 for size in sizes):
        raise UnsupportedError(f"--input {text!r} has a dimension of no size: {_HELP}")
    return TensorSpec(
        name=name,
        dtype=parse_dtype(dtype, "--input") if dtype else None,
        shape=tuple(int(size) for size in sizes),
    )
