"""Lets programs that name the GPU themselves run on fake CPU tensors, as if those lay on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_CPU = torch.device("cpu")


class OnTheGpu(TorchFunctionMode):
    """Takes "cuda" for the device that all tensors are on.

    Shortfall: asked where it is (``tensor.is_cuda``, ``tensor.device``), a tensor names the CPU.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple(_CPU if _names_cuda(item) else item for item in args)
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **(kwargs or {}))


def _names_cuda(item: Any) -> bool:
    if isinstance(item, torch.device):
        return item.type == "cuda"
    return isinstance(item, str) and item.partition(":")[0] == "cuda"
