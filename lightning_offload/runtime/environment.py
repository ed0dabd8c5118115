"""What an op depends on beside its arguments: process-wide and thread-wide settings of torch.

A program may change any of them between forward and backward, or around a part of forward alone. A recorded call
therefore carries the settings that it ran under, and is replayed under them. Autocast is no part of this: it has been
applied where calls are recorded, and is off in replays. Neither is inference mode, whose calls are not recorded.

Shortfall: the settings are those that torch 2.9 to 2.15 read inside kernels. An extension may read others; a replay
that they change is found by the verify step, unless they change later.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

_TINY = 2.2250738585072014e-308  # the smallest normal double


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """One setting.

    Attributes:
        read: Gives its value.
        write: Takes one.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic flushes denormal numbers to zero; torch does not tell."""
    return _TINY * 0.5 == 0.0


def _determinism() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _pair(name: str, setter: str = "") -> list[_Setting]:
    """A setting that torch has as two functions of its C extension; none where this torch does not have it."""
    read, write = getattr(torch._C, f"_get_{name}", None), getattr(torch._C, f"_set_{setter or name}", None)
    return [_Setting(read, write)] if read is not None and write is not None else []


def _precision(backend: str, op: str) -> list[_Setting]:
    """How fp32 is computed by one kind of op; reading the older switches raises where the newer ones were set."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    write = getattr(torch._C, "_set_fp32_precision_setter", None)
    if read is None or write is None:
        return []
    return [_Setting(functools.partial(read, backend, op), functools.partial(write, backend, op))]


def _reduction(name: str) -> list[_Setting]:
    """A switch that is one flag or several, by torch's version."""

    def put(value: Any) -> None:
        setter = getattr(torch._C, f"_set_{name}")
        if isinstance(value, tuple):
            setter(*value)
        else:
            setter(value)

    return [_Setting(_pair(name)[0].read, put)] if _pair(name) else []


_EVERYWHERE = [
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Setting(_determinism, _set_determinism),
    *_pair("deterministic_fill_uninitialized_memory"),
    *_precision("generic", "all"),
    *_pair("math_sdp_enabled", "sdp_use_math"),
    *_pair("flash_sdp_enabled", "sdp_use_flash"),
]
_ON_CPU = [
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _Setting(_flushes_denormals, torch.set_flush_denormal),
    *_pair("mkldnn_enabled"),
    *_pair("mkldnn_deterministic"),
    *_pair("nnpack_enabled"),
    *_pair("cpu_allow_fp16_reduced_precision_reduction"),
    *[setting for op in ("all", "matmul", "conv", "rnn") for setting in _precision("mkldnn", op)],
]
_ON_CUDA = [
    *_pair("cudnn_enabled"),
    *_pair("cudnn_benchmark"),
    *_pair("cudnn_deterministic"),
    *_pair("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    *_pair("cudnn_sdp_enabled", "sdp_use_cudnn"),
    *_pair("math_sdp_allow_fp16_bf16_reduction"),
    *_reduction("cublas_allow_fp16_reduced_precision_reduction"),
    *_reduction("cublas_allow_bf16_reduced_precision_reduction"),
    *_pair("cublas_allow_fp16_accumulation"),
    *_pair("linalg_preferred_backend"),
    *_pair("blas_preferred_backend"),
    *[setting for op in ("all", "matmul", "conv", "rnn") for setting in _precision("cuda", op)],
]


_Read = Callable[[], tuple[Any, ...]]


class Environment:
    """The settings at one moment; calls that ran under the same ones share it."""

    __slots__ = ("_read", "_settings", "_values")

    def __init__(self, settings: tuple[_Setting, ...], read: _Read) -> None:
        self._settings, self._read = settings, read
        self._values = read()

    def now(self) -> Environment:
        """This one where nothing has changed, else another with the settings as they are."""
        return self if self._read() == self._values else Environment(self._settings, self._read)

    def put(self, before: Environment) -> None:
        """Change the settings to these, from those in force, which are ``before``'s."""
        for setting, value, old in zip(self._settings, self._values, before._values, strict=True):
            if value != old:
                setting.write(value)


def environment_on(device: torch.device) -> Environment:
    """The settings as they are that matter to ops on a device."""
    return Environment(*_reader(is_cpu=device.type == "cpu"))


@functools.cache
def _reader(*, is_cpu: bool) -> tuple[tuple[_Setting, ...], _Read]:
    """The settings of a kind of device, and what reads them.

    Written out: it is called for each recorded op, and a loop would take twice as long.
    """
    settings = (*_EVERYWHERE, *(_ON_CPU if is_cpu else _ON_CUDA))
    reads = {f"read_{i}": setting.read for i, setting in enumerate(settings)}
    read: _Read = eval(f"lambda: ({', '.join(f'{name}()' for name in reads)},)", reads)
    return settings, read
