"""Puts an executor in force: the one dispatch mode and the one pair of saved-tensor hooks, and what each may see.

Of stacked hooks only the innermost run, so there is one pair. ``torch.func`` transforms refuse to run under
saved-tensor hooks, so while a step is open ``torch.autograd.graph.disable_saved_tensors_hooks`` takes ours off and
puts them back.

The mode is an *infra mode*: ``torch.compile``d modules stay compiled under it. The runtime's own ops pass it unseen,
within :data:`bypass_mode`. It is taken off for a backward that need not be seen, or for a single node of it.

Note [modes change backward]: some autograd formulas (``prod``, full ``max``, ``masked_fill`` with a tensor) ask
whether any dispatch mode is on (``isTensorSubclassLike``) and then compute the same gradient in another way, with
other roundings or other strides. So the mode is off in backward wherever backward need not be seen, and where it must
be, it is taken off for the nodes of such formulas, which are found by name in autograd's graph before it runs:
autograd restores a thread's modes after each node, so what a hook before the node pops is gone for that node alone.
What such a node made is reported by a hook after it.

Sees what the program's own Python code does to tensors in backward.

A backward of the program's own (a custom ``Function``, a hook of a tensor or a module, an optimizer that steps in
backward) may write what it can reach: saved tensors that it was given, buffers, parameters, also behind the back of
version counters (``x.data``, NumPy, a Triton kernel). What has been recomputed from such memory in plain PyTorch was
computed before; a replay must not read what was written since.

Autograd's formulas themselves write nothing of that, and our dispatch mode is off while they run: see Note [modes
change backward]. A ``TorchFunctionMode`` is exactly the difference: autograd hands it to every node, and it sees the
calls that come from Python alone. The ops of each of them are seen as those of forward are, which settles what needs
the old contents before the first write. A call that gives raw memory away counts as a write.

Compiled code is left alone: calls that are being traced are not looked at, nor is what a compiler runs.

Shortfall: a write by an extension from C++ is noticed by the version counter of what it was given, and a replay that
would read it raises ``StaleInputError``; one that goes by raw memory from a C++ node is not noticed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from typing_extensions import override

from lightning_offload.tensors import compiled_code
from lightning_offload.tensors.geometry import plain_data, plain_set, plain_set_version
from lightning_offload.tensors.op_facts import exposed, is_plain, tensors_in


class _BypassMode(threading.local):
    """While entered, the ops of this thread are the runtime's own."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


bypass_mode = _BypassMode()
"""Entered around everything that the runtime does with tensors."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def dynamo_disabled(function: _Function) -> _Function:
    """Have ``torch.compile`` look neither into a function nor into what that calls, from whatever code it is reached.

    Between the graphs of a compiled function its compiler looks at every Python function that is called, also by
    autograd and by torch's modes. What torch puts around a mode's method against that takes longer than a mode that
    does nothing; a mark on the code says the same.
    """
    return _marked(function, is_recursive=True)


def _dynamo_disabled_alone(function: _Function) -> _Function:
    """The same for a function alone: what that calls of the program's own is compiled as it is without us."""
    return _marked(function, is_recursive=False)


def _marked(function: _Function, *, is_recursive: bool) -> _Function:
    eval_frame = torch._C._dynamo.eval_frame
    strategy, action = getattr(eval_frame, "_FrameExecStrategy", None), getattr(eval_frame, "_FrameAction", None)
    if strategy is None or action is None:
        disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
        return cast("_Function", disable(function, recursive=is_recursive))
    below = action.SKIP if is_recursive else action.DEFAULT
    eval_frame.set_code_exec_strategy(function.__code__, strategy(action.SKIP, below))
    return function


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


class InfraMode(TorchDispatchMode):
    """A mode under which ``torch.compile``d modules stay compiled."""

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True


class StepMode(InfraMode):
    """Hands every op to an executor's ``dispatch``.

    Attributes:
        made: Called with the gradients that a node of autograd made without the mode; None for nobody.
    """

    supports_higher_order_operators = True

    def __init__(self, dispatch: Dispatch, made: Made | None = None) -> None:
        super().__init__()
        self._dispatch = dispatch
        self.made = made


def _see_op(
    self: StepMode, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    if compiled_code.is_being_made():
        return func(*args, **(kwargs or {}))
    return self._dispatch(func, args, kwargs or {})


StepMode.__torch_dispatch__ = dynamo_disabled(_see_op)  # type: ignore[method-assign, assignment]


def past_own_mode() -> contextlib.AbstractContextManager[None]:
    """Around the runtime's own ops on plain tensors: they skip our mode, which takes longer than most of them do.

    Where other modes are on as well (that of fake tensors, or a program's own) they go through them all, and through
    ours by :data:`bypass_mode`.
    """
    if torch._C._len_torch_dispatch_stack() == 1 and isinstance(_get_current_dispatch_mode(), StepMode):
        return torch._C._DisableTorchDispatch()
    return DisableTorchFunction()  # as it is around all of these: nothing, in less time than a context of Python's own


@dynamo_disabled
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

        @dynamo_disabled
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


class _Surroundings:
    """All that is around one backward."""

    __slots__ = ("_roots", "_stack")

    @dynamo_disabled
    def __init__(self, roots: Any) -> None:
        self._roots = roots
        self._stack = contextlib.ExitStack()

    @dynamo_disabled
    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for around in list(_watchers):
                stack.enter_context(around())
            stack.enter_context(_mode_off_where_it_matters(self._roots))
            self._stack = stack.pop_all()

    @dynamo_disabled
    def __exit__(self, *exc: Any) -> bool | None:
        return self._stack.__exit__(*exc)


@_dynamo_disabled_alone
def _run_backward(*args: Any, **kwargs: Any) -> Any:
    with _Surroundings(args[0]):
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


_RAW_MEMORY: frozenset[Any] = frozenset(
    {
        getattr(Tensor, name)
        for name in ("data_ptr", "numpy", "__array__", "__dlpack__", "share_memory_")
        if hasattr(Tensor, name)
    }
) | frozenset({Tensor.__cuda_array_interface__.__get__})  # fmt: skip
"""Calls after which a tensor may be written without another call."""


class _SeeUserCode(TorchFunctionMode):
    def __init__(self, dispatch: Dispatch, seeing: Around) -> None:
        super().__init__()
        self._dispatch = dispatch
        self._seeing = seeing

    @override
    @_dynamo_disabled_alone
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if bypass_mode.depth or torch.compiler.is_compiling() or compiled_code.is_being_made():
            return func(*args, **kwargs)
        if func in _RAW_MEMORY:
            for tensor in tensors_in(args[:1]):
                self._dispatch(exposed, (tensor,), {})
            return func(*args, **kwargs)
        with self._seeing():
            return func(*args, **kwargs)


@contextlib.contextmanager
def seeing_user_code(dispatch: Dispatch, seeing: Around) -> Iterator[None]:
    """Around a backward: what the program's own code does in it goes through a dispatch function.

    Args:
        dispatch: Runs an op.
        seeing: Around each call of that code: its ops go by that.
    """
    if any(isinstance(mode, _SeeUserCode) for mode in _get_current_function_mode_stack()):
        yield
        return
    with _SeeUserCode(dispatch, seeing):
        yield


def is_own_function_mode_alone() -> bool:
    """Whether the one function mode that is on is that which sees the program's code in backward."""
    if torch._C._len_torch_function_stack() != 1:
        return False
    return isinstance(torch._C._get_function_stack_at(0), _SeeUserCode)


DisableTorchFunction: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Around the runtime's own calls of torch in a backward, to spare them the way through the mode."""


class HookedExecutor(Protocol):
    """What executes a step.

    Attributes:
        sees_ops: Whether the step's ops must go through ``dispatch``.
        packs: Whether saved tensors must go through ``pack`` and ``unpack``; then it is told of ``Tensor.data`` and its
            like, and of storages that are resized.
    """

    sees_ops: bool
    packs: bool

    @property
    def watches_backward(self) -> bool:
        """Whether the ops of backward must go through ``dispatch``, too."""

    def seeing(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the ops of this thread come by."""

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that autograd saves."""

    def unpack(self, packed: Any) -> Tensor:
        """Give it back."""

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, what this thread saves goes through ``pack`` and ``unpack``."""

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of the program."""

    def made(self, tensors: list[Tensor]) -> None:
        """Hear of tensors that autograd made out of sight of the mode."""

    def data_escapes(self, storage: torch.UntypedStorage, tensor: Tensor | None) -> None:
        """Hear that the program takes a storage past version counters, before it does; of which tensor, if of one."""

    def resizes(self, storage: torch.UntypedStorage) -> None:
        """Hear that the program is about to give a storage another size."""

    def resized(self, storage: torch.UntypedStorage, num_bytes_before: int) -> None:
        """Hear that it has done so."""

    def close(self) -> None:
        """End the part of the step in which tensors are saved."""


def within_transform() -> bool:
    """Whether this thread runs within a transform of ``torch.func`` (``grad``, ``vmap``, ``jvp``).

    Saved-tensor hooks are refused there, and tensors wrap others.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def within_hooks_of_others() -> bool:
    """Whether what this thread saves goes to hooks that were there before a step, or may go to none.

    Hooks of a step would be inside of theirs and take it all. A checkpoint around a forward runs it again and counts
    what is saved to tell what is what; others store it in a form of their own.
    """
    hooks = torch._C._autograd
    if hooks._saved_tensors_hooks_get_disabled_error_message() is not None:
        return True
    return hooks._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def executing(executor: HookedExecutor, *, hooks: bool = True) -> Iterator[None]:
    """Run what is inside under an executor.

    Args:
        executor: The step's executor.
        hooks: Whether tensors saved inside are packed; False around a backward that is only watched.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(executor.close)
        if hooks and executor.packs:
            stack.enter_context(executor.hooks())
            stack.enter_context(_yielding_to_functorch(executor))
        if executor.packs:
            stack.enter_context(_tracking_data_escapes(executor))
        if executor.sees_ops and (hooks or executor.watches_backward):
            stack.enter_context(executor.seeing())
        yield


_OPEN = threading.local()
_PATCH_LOCK = threading.Lock()
_num_patches = 0
_original_disable = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
    """Stands in for torch's: takes our hooks off inside, where they are the only ones."""
    executor = getattr(_OPEN, "executor", None)
    if executor is None or not _ours_is_top(executor):
        with _original_disable(error_message):
            yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    _OPEN.executor = None
    try:
        with _original_disable(error_message):
            yield
    finally:
        _OPEN.executor = executor
        torch._C._autograd._push_saved_tensors_default_hooks(executor.pack, executor.unpack)


def _ours_is_top(executor: HookedExecutor) -> bool:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[0] == executor.pack


@contextlib.contextmanager
def _yielding_to_functorch(executor: HookedExecutor) -> Iterator[None]:
    global _num_patches
    previous = getattr(_OPEN, "executor", None)
    _OPEN.executor = executor
    with _PATCH_LOCK:
        _num_patches += 1
        torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks
    try:
        yield
    finally:
        _OPEN.executor = previous
        with _PATCH_LOCK:
            _num_patches -= 1
            if _num_patches == 0:
                torch.autograd.graph.disable_saved_tensors_hooks = _original_disable


_plain_resize: Any = torch.UntypedStorage.resize_
_escape_trackers: list[HookedExecutor] = []
_num_patched = 0


def _notify_escape(item: Any) -> None:
    """Tell executors that a tensor's memory, or a storage, escapes to another version counter."""
    tensor: Tensor | None = None
    with torch._C.DisableTorchFunction():
        if isinstance(item, Tensor):
            while torch._C._functorch.is_functorch_wrapped_tensor(item):  # has no memory of its own
                item = torch._C._functorch.get_unwrapped(item)
            if not is_plain(item) or torch._C._functorch.is_legacy_batchedtensor(item):
                return
            tensor, item = item, item.untyped_storage()
        elif isinstance(item, torch.TypedStorage):
            item = item._untyped_storage
        if isinstance(item, torch.UntypedStorage):
            for executor in list(_escape_trackers):
                executor.data_escapes(item, tensor)


def _get_data(tensor: Tensor) -> Any:
    if _escape_trackers and not bypass_mode.depth:
        if compiled_code.is_inspecting():
            with bypass_mode:
                return plain_data.__get__(tensor)
        _notify_escape(tensor)
    return plain_data.__get__(tensor)


def _set(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _escape_trackers and not bypass_mode.depth:
        for source in (*args[:1], *kwargs.values()):
            _notify_escape(source)
    return plain_set(tensor, *args, **kwargs)


def _set_version(tensors: Any, versions: Any) -> None:
    """Stands in for torch's: what was written meanwhile is to show in no counter."""
    if _escape_trackers and not bypass_mode.depth:
        for tensor in tensors:
            _notify_escape(tensor)
    plain_set_version(tensors, versions)


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    if bypass_mode.depth or not _escape_trackers:
        return _plain_resize(storage, size)
    trackers, num_bytes_before = list(_escape_trackers), storage.nbytes()
    for executor in trackers:
        executor.resizes(storage)
    out = _plain_resize(storage, size)
    for executor in trackers:
        executor.resized(storage, num_bytes_before)
    return out


_NN: Any = torch._C._nn


def _named(plain: Any, name: str, owner: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Have what stands in for a function of torch be found where it stands, by pickle above all."""

    def rename(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        functools.update_wrapper(function, plain)
        function.__module__, function.__qualname__ = owner.__name__, name
        return function

    return rename


def _tracking_noise(plain: Any, name: str) -> Callable[..., Tensor]:
    """Stands in for `rrelu_with_noise`, which writes its noise after autograd has saved it, and no counter counts that.

    Of all operators it alone does so; see the schemas that mark an argument as written which is not the first.
    """

    @_named(plain, name, torch._C._nn)
    def rrelu_with_noise(input: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _escape_trackers and not bypass_mode.depth:
            _notify_escape(noise)
        out: Tensor = plain(input, noise, *args, **kwargs)
        return out

    return rrelu_with_noise


def _with_own_noise(
    plain: Any, with_noise: Callable[..., Tensor], name: str, owner: Any = torch
) -> Callable[..., Tensor]:
    """Stands in for `rrelu`: with noise made where it can be told of, as the operator makes it."""

    @_named(plain, name, owner)
    def rrelu(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _escape_trackers and not bypass_mode.depth and isinstance(input, Tensor):
            noise = torch.empty_like(input, memory_format=torch.contiguous_format)
            return with_noise(input, noise, *args, **kwargs)
        out: Tensor = plain(input, *args, **kwargs)
        return out

    return rrelu


_PLAIN_RRELU: dict[tuple[Any, str], Any] = {
    (_NN, "rrelu_with_noise"): _NN.rrelu_with_noise,
    (_NN, "rrelu_with_noise_"): _NN.rrelu_with_noise_,
    (torch, "rrelu"): torch.rrelu,
    (torch, "rrelu_"): torch.rrelu_,
    (torch.nn.functional, "rrelu_"): torch.nn.functional.rrelu_,
}
_with_noise = _tracking_noise(_NN.rrelu_with_noise, "rrelu_with_noise")
_with_noise_ = _tracking_noise(_NN.rrelu_with_noise_, "rrelu_with_noise_")
_TRACKED_RRELU: dict[tuple[Any, str], Any] = {
    (_NN, "rrelu_with_noise"): _with_noise,
    (_NN, "rrelu_with_noise_"): _with_noise_,
    (torch, "rrelu"): _with_own_noise(torch.rrelu, _with_noise, "rrelu"),
    (torch, "rrelu_"): _with_own_noise(torch.rrelu_, _with_noise_, "rrelu_"),
    (torch.nn.functional, "rrelu_"): _with_own_noise(
        torch.nn.functional.rrelu_, _with_noise_, "rrelu_", torch.nn.functional
    ),
}


_tracked_data = property(_get_data, plain_data.__set__, doc=plain_data.__doc__)


def patch_data_escapes() -> Callable[[], None]:
    """Have executors told of data escapes, by ``Tensor.data`` and its like, in open steps, in all threads.

    By it, by ``Tensor.set_`` and by taking a version back Python gets to a tensor's memory, or to what was written
    there, past the version counter: such writes are seen by a dispatch mode alone. So are those into the noise of
    ``rrelu``, which autograd has saved before. Executors hear of ``UntypedStorage.resize_`` as well, by which sharded
    parameters come and go, and of which nobody else tells.

    Not for each step anew: what Python caches of a type's attributes starts afresh whenever one changes.

    Returns:
        What ends it; to be called once.
    """
    global _num_patched
    with _PATCH_LOCK:
        _num_patched += 1
        if _num_patched == 1:
            Tensor.data = _tracked_data  # type: ignore[assignment]
            Tensor.set_ = _set  # type: ignore[assignment]
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign,assignment]
            torch._C._autograd._unsafe_set_version_counter = _set_version  # type: ignore[assignment]
            for (owner, name), function in _TRACKED_RRELU.items():
                setattr(owner, name, function)
    return _unpatch_data_escapes


def _unpatch_data_escapes() -> None:
    global _num_patched
    with _PATCH_LOCK:
        _num_patched -= 1
        if not _num_patched:
            del Tensor.data
            del Tensor.set_
            torch.UntypedStorage.resize_ = _plain_resize  # type: ignore[method-assign]
            torch._C._autograd._unsafe_set_version_counter = plain_set_version
            for (owner, name), function in _PLAIN_RRELU.items():
                setattr(owner, name, function)


@contextlib.contextmanager
def _tracking_data_escapes(executor: HookedExecutor) -> Iterator[None]:
    """Inside, an executor is told of data escapes; cf. :func:`patch_data_escapes`."""
    end = patch_data_escapes()
    _escape_trackers.append(executor)
    try:
        yield
    finally:
        _escape_trackers.remove(executor)
        end()
