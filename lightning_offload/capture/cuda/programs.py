"""Lets programs that name the GPU themselves run on fake CPU tensors, as if those lay on it.

Shortfalls: asked where it is (``tensor.is_cuda``, ``tensor.device``), a tensor names the CPU. What needs a GPU whatever
the tensors (a generator of random numbers there, a stream, ``torch.cuda.current_device``) fails as without one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_offload.capture.cuda.overrides import in_this_thread

_CPU = torch.device("cpu")


class _Devices(TorchFunctionMode):
    """Takes "cuda" for the device that all tensors are on."""

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
    if isinstance(item, int):  # the index of one; True is none, but says something else
        return not isinstance(item, bool)
    return isinstance(item, str) and item.partition(":")[0] == "cuda"


def _module_to(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if any(map(_names_cuda, args)) or _names_cuda(kwargs.get("device")):
        args = tuple(item for item in args if not _names_cuda(item))
        kwargs = {name: item for name, item in kwargs.items() if name != "device"}
        kwargs.pop("non_blocking", None)
        if not args and not kwargs:
            return module
    return plain(module, *args, **kwargs)


def _module_cuda(_plain: Any, module: nn.Module, *_args: Any, **_kwargs: Any) -> Any:
    return module


def _autocast_begins(plain: Any, self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
    plain(self, device_type, dtype, *args, **kwargs)


@contextlib.contextmanager
def on_the_gpu() -> Iterator[None]:
    """Inside, this thread's programs may name the GPU for the device of fake CPU tensors; so may ``torch.autocast``.

    Not for two threads at once, nor for one within itself.
    """
    autocast: Any = torch.amp.autocast_mode.autocast
    with contextlib.ExitStack() as stack:
        for owner, attribute, function in (
            (nn.Module, "to", _module_to), (nn.Module, "cuda", _module_cuda), (autocast, "__init__", _autocast_begins),
        ):  # fmt: skip
            plain = getattr(owner, attribute)
            here = in_this_thread(functools.partial(function, plain), plain)
            setattr(owner, attribute, functools.wraps(plain)(here))
            stack.callback(setattr, owner, attribute, plain)
        stack.enter_context(_Devices())
        yield
