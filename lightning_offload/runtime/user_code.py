"""Sees what the program's own Python code does to tensors in backward.

A backward of the program's own (a custom ``Function``, a hook of a tensor or a module, an optimizer that steps in
backward) may write what it can reach: saved tensors that it was given, buffers, parameters, also behind the back of
version counters (``x.data``, NumPy, a Triton kernel). What has been recomputed from such memory in plain PyTorch was
computed before; a replay must not read what was written since.

Autograd's formulas themselves write nothing of that, and our dispatch mode is off while they run: see Note [modes
change backward]. A ``TorchFunctionMode`` is exactly the difference: autograd hands it to every node, and it sees the
calls that come from Python alone. Each of them is dispatched under our mode, which settles what needs the old contents
before the first write. A call that gives raw memory away counts as a write.

Compiled code is left alone: calls that are being traced are not looked at.

Shortfall: a write by an extension from C++ is noticed by the version counter of what it was given, and a replay that
would read it raises ``StaleInputError``; one that goes by raw memory from a C++ node is not noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from typing_extensions import override

from lightning_offload.runtime.step_mode import Dispatch, Made, StepMode
from lightning_offload.runtime.switch import unseen
from lightning_offload.tensors.op_facts import exposed, tensors_in

_RAW_MEMORY: frozenset[Any] = frozenset(
    {
        getattr(Tensor, name)
        for name in ("data_ptr", "numpy", "__array__", "__dlpack__", "share_memory_")
        if hasattr(Tensor, name)
    }
) | frozenset({Tensor.__cuda_array_interface__.__get__})  # fmt: skip
"""Calls after which a tensor may be written without another call."""


class _SeeUserCode(TorchFunctionMode):
    def __init__(self, dispatch: Dispatch, made: Made) -> None:
        super().__init__()
        self._dispatch = dispatch
        self._made = made

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or unseen.depth:
            return func(*args, **kwargs)
        if func in _RAW_MEMORY:
            for tensor in tensors_in(args[:1]):
                self._dispatch(exposed, (tensor,), {})
            return func(*args, **kwargs)
        with StepMode(self._dispatch, self._made):
            return func(*args, **kwargs)


@contextlib.contextmanager
def seeing_user_code(dispatch: Dispatch, made: Made) -> Iterator[None]:
    """Around a backward: what the program's own code does in it goes through a dispatch function.

    Args:
        dispatch: Runs an op.
        made: Is told of what autograd makes out of its sight.
    """
    if any(isinstance(mode, _SeeUserCode) for mode in _get_current_function_mode_stack()):
        yield
        return
    with _SeeUserCode(dispatch, made):
        yield


NotSeen: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Around the runtime's own calls of torch in a backward, to spare them the way through the mode."""
