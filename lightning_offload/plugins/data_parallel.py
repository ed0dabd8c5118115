"""What `DistributedDataParallel` does beside the model's own step: its gradient buckets, and its work around forward.

Each rank runs its own memory plugin, and nothing here issues a collective that DDP would not issue at the same
place: ranks may meet new shapes at different steps.

Note [Buckets]: the reducer copies gradients into flat buffers, the buckets, and all-reduces those. They are as
large as the gradients, live as long as the model and are not reachable from Python, so their storages are noted
while DDP allocates them. After the first backward DDP lays them out anew, once, in the order in which gradients
became ready (not with ``find_unused_parameters``). Of a model that was wrapped before a plugin met it the bytes are
known, and the storages from what a recorded backward all-reduces.

Note [DDP's own forward]: before forward DDP may broadcast buffers and, once, lay its buckets out anew by a collective;
after it it may pass the outputs through a node of its own, in some steps and not in others (the first one, those after
`no_sync`). These ops save nothing and belong to no plan, so they are run unseen, where and when DDP runs them: the
recorded step is the model's own, the same in every step. Where a step begins in a hook of the model inside the wrapper
they are no part of it anyway.

Note [The shared link]: on a GPU whose peers are reached over PCIe the all-reduce of gradients goes over the link that
brings swapped tensors back, and at the same time: in backward. Each device receives ``2 (N - 1) / N`` of the
gradients' bytes, in a ring. PCIe shares itself evenly between transfers, so copies get at least half of the link;
averaged over backward they get what is left, ``1 - all-reduce / backward``. Copies out are made in forward above all,
where there is no all-reduce, and keep their rate. Over NVLink, and on a CPU, nothing is shared.

Known shortfall: the network of several nodes is not told from PCIe; where its cards have links of their own, plans
are too careful. What measured steps show of a link (``plugins.link_rates``) is true of the shared link already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_offload.accelerators import kind_of, properties_of
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.class_swap import graft, ungraft
from lightning_offload.runtime.hooks import bypass_mode
from lightning_offload.runtime.sight import unseen
from lightning_offload.tensors.op_facts import ALL_REDUCE, effects, facts_of, is_plain, tensors_in

_P = ParamSpec("_P")
_References = dict[int, "weakref.ref[torch.UntypedStorage]"]


def num_ranks() -> int:
    """Number of processes that train together, this one included."""
    is_alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    return 1 if is_alone else torch.distributed.get_world_size()


_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def num_local_ranks() -> int:
    """Number of processes on this host that train together, this one included.

    Launchers tell. Where none did, all of them count, but no more than there are devices if this process sees several.
    """
    told = (os.environ.get(name, "") for name in _LOCAL_SIZES)
    local = next((int(text) for text in told if text.isdecimal()), 0)
    if local:
        return local
    ranks = num_ranks()
    devices = torch.accelerator.device_count() if ranks > 1 else 1
    return min(ranks, devices) if devices > 1 else ranks


class InSync:
    """Given among a step's inputs: its backward all-reduces the gradients."""


class WithoutSync:
    """Given among a step's inputs: its backward only accumulates gradients, as under `no_sync`."""


class GradientBuckets:
    """The storages that DDP allocates for itself and keeps: its gradient buckets, see Note [Buckets].

    Attributes:
        version: Grows when there are others than before.
    """

    def __init__(self) -> None:
        self.version = 0
        self._made: _References = {}
        self._expected: weakref.WeakKeyDictionary[DistributedDataParallel, list[int]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Around the construction of a `DistributedDataParallel`: what it allocates and keeps is noted."""
        made: _References = {}
        with _Allocations(made):
            yield
        self._made.update((key, ref) for key, ref in made.items() if ref() is not None)

    def expect(self, model: DistributedDataParallel) -> None:
        """Count the buckets of a model whose construction was not noted."""
        told = model._get_ddp_logging_data()
        sizes = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
        self._expected[model] = [int(size) for size in sizes.split(",")]
        self.version += 1

    def place(self, reduced: _References) -> None:
        """Find expected buckets among the storages that a recorded backward all-reduced."""
        for key, reference in reduced.items():
            storage = reference()
            if storage is None or key in self.sizes():
                continue
            for model, sizes in self._expected.items():
                if model.device == storage.device and storage.nbytes() in sizes:
                    sizes.remove(storage.nbytes())
                    self._made[key] = reference
                    break

    def were_laid_out(self, model: DistributedDataParallel, made: _References) -> None:
        """Know the buckets that DDP has made in place of others."""
        self._made.update((key, ref) for key, ref in made.items() if ref() is not None)
        self._expected.pop(model, None)
        self.version += 1

    def sizes(self, device: torch.device | None = None) -> dict[int, int]:
        """Bytes on a device, or on all of them, by identity of the storage; below zero where that is not known."""
        storages = ((key, ref()) for key, ref in self._made.items())
        placed = {key: s.nbytes() for key, s in storages if s is not None and device in (None, s.device)}
        expected = {-id(model): sum(of) for model, of in self._expected.items() if device in (None, model.device)}
        return {**placed, **{key: size for key, size in expected.items() if size}}

    def storages(self, device: torch.device) -> dict[int, torch.UntypedStorage]:
        """Those on a device whose place is known, by identity."""
        storages = ((key, ref()) for key, ref in self._made.items())
        return {key: s for key, s in storages if s is not None and s.device == device}

    def expected_bytes(self, device: torch.device) -> int:
        """Bytes on a device of those whose place is not known yet."""
        return sum(sum(of) for model, of in self._expected.items() if model.device == device)

    def are_gone_from(self, external: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> bool:
        """Whether storages that a step touched were buckets that are no more: of another layout, or of another fit."""
        return any(key in self._made and ref() is None for key, ref in external.items())


class DataParallelModels:
    """The `DistributedDataParallel` models that a plugin's steps have to do with.

    Attributes:
        buckets: Their gradient buckets.
    """

    def __init__(self) -> None:
        self.buckets = GradientBuckets()
        self._known: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._called: weakref.ref[DistributedDataParallel] | None = None

    @property
    def called(self) -> DistributedDataParallel | None:
        """The one that is called within each step; None where the model is called without it, or steps are in it."""
        return self._called() if self._called is not None else None

    @called.setter
    def called(self, model: DistributedDataParallel | None) -> None:
        self._called = weakref.ref(model) if model is not None else None

    def construct(self, wrap: Callable[_P, DistributedDataParallel], *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Wrap a model, and know its buckets from the beginning."""
        with self.buckets.noted():
            model = wrap(*args, **kwargs)
        self._known.add(model)
        return model

    def watch(self, model: DistributedDataParallel) -> None:
        """Know a model that is wrapped already; idempotent."""
        if model not in self._known:
            self._known.add(model)
            self.buckets.expect(model)


def mark_of(model: DistributedDataParallel | None) -> tuple[object, ...]:
    """What tells the kind of a step under DDP beside its inputs: whether its backward all-reduces the gradients."""
    if model is None:
        return ()
    return (InSync() if model.require_backward_grad_sync else WithoutSync(),)


class _Allocations(TorchDispatchMode):
    """Notes the storages that ops make."""

    def __init__(self, made: _References) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        did = effects(facts_of(func), args, kwargs, out)
        for storage in did.made_on[: did.num_fresh]:
            self._made[storage._cdata] = weakref.ref(storage)
        return out


class _UnseenAroundForward:
    """What `run_unseen_around_forward` puts in front of a wrapper's class."""

    grafted_attributes = ("_offload_buckets",)
    _offload_buckets: weakref.WeakSet[GradientBuckets]

    def _pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = functools.partial(super()._pre_forward, *args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return before()
        with bypass_mode, unseen(self.device):
            if not _may_lay_out(self):
                return before()
            made: _References = {}
            with _Allocations(made):
                inputs = before()
            if self._has_rebuilt_buckets:
                for tensor in filter(is_plain, tensors_in(inputs)):  # moved to the device
                    made.pop(tensor.untyped_storage()._cdata, None)
                for buckets in vars(self).get("_offload_buckets", ()):  # none where another class stands before this
                    buckets.were_laid_out(self, made)
            return inputs

    def _post_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        after = functools.partial(super()._post_forward, *args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return after()
        with bypass_mode, unseen(self.device):
            return after()


def _may_lay_out(model: DistributedDataParallel) -> bool:
    """Whether DDP may lay its buckets out anew in this forward: once, where all parameters are used."""
    uses_all = model.static_graph or not model.find_unused_parameters
    return uses_all and not model._has_rebuilt_buckets and torch.is_grad_enabled()


def run_unseen_around_forward(model: DistributedDataParallel, buckets: GradientBuckets) -> Callable[[], None]:
    """Make DDP do its own work around forward unseen, see Note [DDP's own forward]; idempotent.

    Args:
        model: Does its work where and when it does without us: ranks would wait for others' collectives.
        buckets: Hear of those that it lays out.

    Returns:
        What takes that back.
    """
    graft(model, _UnseenAroundForward)
    vars(model).setdefault("_offload_buckets", weakref.WeakSet()).add(buckets)
    return functools.partial(_run_as_usual, weakref.ref(model), weakref.ref(buckets))


def _run_as_usual(model: weakref.ref[DistributedDataParallel], buckets: weakref.ref[GradientBuckets]) -> None:
    wrapper = model()
    told = vars(wrapper).get("_offload_buckets") if wrapper is not None else None
    if told is None:
        return
    told.discard(buckets())
    if not told:
        ungraft(wrapper, _UnseenAroundForward)


_LEAST_SHARE = 0.5  # of the link that copies get beside an exchange: both take turns


def reduced_bytes(graph: StepGraph) -> int:
    """Bytes that the step's backward all-reduces."""
    values = (v for op in graph.ops if op.phase == "backward" and op.name.startswith(ALL_REDUCE) for v in op.inputs)
    return sum(graph.storages[graph.values[v].storage].num_bytes for v in values)


def under_all_reduce(spec: DeviceSpec, graph: StepGraph, num_peers: int) -> DeviceSpec:
    """The device with the rate at which copies come back while gradients are all-reduced over the same link."""
    num_bytes = 2 * (num_peers - 1) / num_peers * reduced_bytes(graph)
    if not num_bytes:
        return spec
    backward_seconds = sum(op.seconds for op in graph.ops if op.phase == "backward")
    seconds = num_bytes / spec.h2d_bytes_per_second
    share = 1 - seconds / backward_seconds if backward_seconds > seconds else 0.0
    return dataclasses.replace(spec, h2d_bytes_per_second=max(_LEAST_SHARE, share) * spec.h2d_bytes_per_second)


def shared_spec(spec: DeviceSpec, graph: StepGraph, device: torch.device) -> DeviceSpec:
    """The device as this rank's copies find it."""
    if not kind_of(device).has_streams or num_ranks() == 1 or has_nvlink(device):
        return spec
    return under_all_reduce(spec, graph, num_ranks())


def has_nvlink(device: torch.device, nvml: Any = None) -> bool:
    """Whether a GPU has an active NVLink; False where the driver does not tell, or there is no NVML to ask it by.

    Args:
        device: The GPU.
        nvml: The driver's library, ``pynvml`` by default.
    """
    if not kind_of(device).has_nvml:
        return False
    with contextlib.suppress(Exception):  # no driver, no permission, no NVLink: there are many ways to say so
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties_of(device).uuid}")
        return any(_is_active(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    return False


def _is_active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:  # this one is not there
        return False
