"""The one dispatch mode, and how it is taken off for a backward or for a single node of it.

The mode is an *infra mode*: ``torch.compile``d modules stay compiled under it.

Note [modes change backward]: some autograd formulas (``prod``, full ``max``, ``masked_fill`` with a tensor) ask whether
any dispatch mode is on (``isTensorSubclassLike``) and then compute the same gradient in another way, with other
roundings or other strides. So the mode is off in backward wherever backward need not be seen, and where it must be, it
is taken off for the nodes of such formulas, which are found by name in autograd's graph before it runs: autograd
restores a thread's modes after each node, so what a hook before the node pops is gone for that node alone. What such a
node made is told by a hook after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from typing_extensions import override

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Made = Callable[[list[Tensor]], None]

CHANGED_BY_MODES = frozenset(
    f"{name}Backward"
    for name in (
        "Prod", "Cumprod", "Max", "Min", "Median", "Nanmedian", "MaskedFill", "LinalgDet", "LinalgEig", "LinalgEigh",
        "LinalgMatrixExp", "LinalgHouseholderProduct", "Ormqr", "BinaryCrossEntropy", "BinaryCrossEntropyBackward",
        "BinaryCrossEntropyWithLogits",
    )
)  # fmt: skip
"""Nodes, but for their numbers, whose formula computes otherwise under a mode: Note [modes change backward].

Formulas that only choose between a call in place and the same call out of place (``clamp``, ``topk``, ``take``) are not
among them: what they give is the same.
"""


class StepMode(TorchDispatchMode):
    """Hands every op to an executor's ``dispatch``.

    Attributes:
        made: Is told of the gradients that a node of autograd made without the mode, if anybody is.
    """

    supports_higher_order_operators = True

    def __init__(self, dispatch: Dispatch, made: Made | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dispatch = dispatch
        self.made = made

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._dispatch(func, args, kwargs or {})

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True


def _leave(_: Any) -> None:
    """A hook before a node: it runs without our mode, which is there twice where user code in backward is seen."""
    while isinstance(_get_current_dispatch_mode(), StepMode):
        _pop_mode()


@contextlib.contextmanager
def _mode_off_where_it_matters(roots: Any) -> Iterator[None]:
    """Run a backward from these tensors, or edges, in which nodes that a mode would change run without ours."""
    handles: list[Any] = []
    mode = _get_current_dispatch_mode()
    if isinstance(mode, StepMode):
        made = mode.made

        def tell(gradients: Any, _: Any) -> None:
            if made is not None:
                made([gradient for gradient in gradients if gradient is not None])

        for node in _nodes(roots):
            if node.name().rstrip("0123456789") in CHANGED_BY_MODES:
                handles += (node.register_prehook(_leave), node.register_hook(tell))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nodes(roots: Any) -> Iterator[Any]:
    """Every node of autograd's graph that leads to some roots."""
    with torch._C.DisableTorchFunction():
        stack = [root.grad_fn if isinstance(root, Tensor) else getattr(root, "node", None) for root in roots]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)


@contextlib.contextmanager
def mode_off() -> Iterator[None]:
    """Run a backward without our mode, if it is the innermost one."""
    modes = []
    while isinstance(_get_current_dispatch_mode(), StepMode):
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


Around = Callable[[], contextlib.AbstractContextManager[None]]
_watchers: list[Around] = []
_original_run_backward = torch.autograd.graph._engine_run_backward


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for around in list(_watchers):
            stack.enter_context(around())
        stack.enter_context(_mode_off_where_it_matters(args[0]))
        return _original_run_backward(*args, **kwargs)


def watch_backward(around: Around) -> Callable[[], None]:
    """Run every backward of this process inside a context manager, however it is called.

    Returns:
        What ends the watch.
    """
    _watchers.append(around)
    _install(_run_backward)

    def end() -> None:
        if around in _watchers:
            _watchers.remove(around)
        if not _watchers:
            _install(_original_run_backward)

    return end


def _install(run_backward: Any) -> None:
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
    torch.autograd.graph._engine_run_backward = run_backward
