"""What a tuning changes: the batch size and the learning rate, wherever this run keeps them.

A batch size is an attribute of the model or its data, or that of the dataloaders that were passed to `fit()`, which
are then made again. Everything a user may have got wrong about them is found here, before anything is run.

A batch size that nobody keeps by its name is looked for in the keywords that a model or its data keep for their loaders
(a mapping with that entry); where there are none, the loaders of `train_dataloader()` are made again, each time it is
called. A learning rate that is nowhere is the optimizers': their groups are scaled as they are.

A name is looked for in the LightningModule, its `hparams`, the LightningDataModule and its `hparams`, and, where none
of them has it, inside nested hparams. A dotted name ("hparams.data.batch_size") is followed step by step, through
attributes and mappings. A batch size is read from the data first, which make the loaders, a rate from the model. It is
set in every place that has the same value, and in the hparams that Lightning is about to log; what has another value
under that name is another value.

A checkpoint's hyperparameters make a model again (`load_from_checkpoint`). A rate that was scaled belongs to the found
batch size: where that is not among the same hyperparameters, the model would come with one and without the other, and
a second tuning would scale the rate once more. Then the configured rate is written. Checkpoints of weights alone have
hyperparameters too, and of those only the model's own hook hears, not a callback's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch.nn.parameter import is_lazy

from lightning_offload.callbacks.tuning.batches import all_resized, loaders_in, resized, sizes_of
from lightning_offload.callbacks.tuning.options import FinderOptions
from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.callbacks.tuning.trainer_facts import accumulation_of
from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import import_from, rank_zero
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.tuning.snapshot import RandomStates, StateSnapshot

_LOGGED = "_hparams_initial"
_USUAL_SIZE, _USUAL_RATE = "batch_size", "lr"
"""Names that a user need not have given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A value in an object: under a key of a mapping, or an attribute."""

    holder: Any
    key: str

    def get(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, Mapping) else getattr(self.holder, self.key)

    def set(self, value: Any) -> None:
        if isinstance(self.holder, MutableMapping):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """A named value of a model or its data.

    Attributes:
        name: As the user gave it.
        places: Where it is, the hparams that Lightning logs included.
    """

    name: str
    places: tuple[_Place, ...]

    def get(self) -> Any:
        """Read the value."""
        return self.places[0].get()

    def set(self, value: Any) -> None:
        """Set the value wherever it is.

        Raises:
            TuningError: It cannot be set.
        """
        for place in self.places:
            try:
                if place.get() != value:
                    place.set(value)
            except Exception as error:
                raise TuningError(
                    f"`{self.name}` of {type(place.holder).__name__} cannot be set to {value!r} ({error}): make it a"
                    " plain attribute or an entry of hparams"
                ) from error


def find_attribute(name: str, *owners: Any) -> Attribute | None:
    """Find a value by name, that of the first owner that has one; None where there is none.

    Args:
        name: Perhaps a dotted one.
        owners: Where to look; None is nobody.

    Raises:
        TuningError: Nested hparams have several values of that name.
    """
    owners = tuple(owner for owner in owners if owner is not None)
    hparams = [_hparams(owner) for owner in owners]
    roots = [root for owner, kept in zip(owners, hparams, strict=True) for root in (owner, kept)]
    places = _distinct(place for root in roots for place in _at(root, name))
    if not places:
        places = _distinct(place for kept in hparams for place in _nested(kept, name))
        _check_unique(name, places)
    if not places:
        return None
    logged = [place for owner in owners for place in _places_in(vars(owner).get(_LOGGED), name)]
    value = places[0].get()
    return Attribute(name=name, places=tuple(place for place in (*places, *logged) if _is_one(place.get(), value)))


def _is_one(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception:  # of arrays
        return False


def _hparams(owner: Any) -> Any | None:
    # not through the property, which makes empty hparams where there are none
    return vars(owner).get("_hparams") or vars(owner).get("hparams")


def _places_in(hparams: Any, name: str) -> list[_Place]:
    """Where a named value is in hyperparameters: at its dotted name, or anywhere inside of them."""
    return _at(hparams, name.removeprefix("hparams.")) or list(_nested(hparams, name))


def _at(root: Any, name: str) -> list[_Place]:
    """The place of a dotted name, if there is one."""
    *path, key = name.split(".")
    for part in path:
        root = root.get(part) if isinstance(root, Mapping) else getattr(root, part, None)
    if root is None or (key not in root if isinstance(root, Mapping) else not _has(root, key)):
        return []
    return [_Place(holder=root, key=key)]


def _has(owner: Any, name: str) -> bool:
    try:
        getattr(owner, name)
    except Exception:  # of a property that needs what is not there yet
        return False
    return True


def _nested(root: Any, name: str, known: set[int] | None = None) -> Iterator[_Place]:
    """Places of a name inside of hparams that hold other mappings or namespaces, which may refer to one another."""
    known = set() if known is None else known
    members = root if isinstance(root, Mapping) else getattr(root, "__dict__", None)
    if not isinstance(members, Mapping) or id(root) in known:
        return
    known.add(id(root))
    for key, value in members.items():
        if key == name:
            yield _Place(holder=root, key=name)
        elif isinstance(value, Mapping) or (hasattr(value, "__dict__") and not callable(value)):
            yield from _nested(value, name, known)


def _distinct(places: Iterable[_Place]) -> list[_Place]:
    return list({id(place.holder): place for place in places}.values())


def _check_unique(name: str, places: list[_Place]) -> None:
    if len({repr(place.get()) for place in places}) > 1:
        values = ", ".join(repr(place.get()) for place in places)
        raise TuningError(
            f"the hparams have several values named {name!r} ({values}): give a dotted name, such as 'data.{name}'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Where the values are.

    Attributes:
        package: The Lightning package in use.
        size: The attribute with the batch size; None where there is none: the loaders are made again then.
        rate: The attribute with the learning rate; None where the groups are scaled as they are.
        loaders: Those passed to `fit()`; None where the model or its data make them.
        base_size: Batch size as the user configured it.
        base_rate: Learning rate as the user configured it; None without an attribute.
    """

    package: str
    size: Attribute | None
    rate: Attribute | None
    loaders: Any | None
    base_size: int
    base_rate: float | None

    def load(self, trainer: Any, batch_size: int) -> None:
        """Set a size, and have the fit loop ask for loaders of it."""
        if self.size is not None:
            self.size.set(batch_size)
        source = trainer.fit_loop._data_source
        forget_remade(trainer)
        is_other = batch_size != self.base_size
        if self.loaders is not None:
            source.instance = all_resized(self.loaders, batch_size, self.package) if is_other else self.loaders
        elif self.size is None and is_other:
            source.dataloader = lambda: all_resized(type(source).dataloader(source), batch_size, self.package)

    def apply(self, trainer: Any, batch_size: int, rate: float | None) -> None:
        """Set a size and a rate for the coming fit."""
        self.load(trainer, batch_size)
        if self.rate is not None and rate is not None:
            self.rate.set(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fit at its start, and what is asked of its tuning.

    Attributes:
        trainer: Its strategy is set up for the model.
        module: The model.
        options: What the user asked for.
        targets: Where batch size and learning rate are kept.
        start: What the training is to begin from.
        agreement: Between the ranks.
        clock: Tells seconds.
    """

    trainer: Any
    module: Any
    options: FinderOptions
    targets: Targets
    start: StateSnapshot
    agreement: Coordinator
    clock: Callable[[], float]


def with_rate_of_now(targets: Targets) -> Targets:
    """The same with the rate that another callback has set since, as Lightning's `LearningRateFinder` does."""
    return targets if targets.rate is None else dataclasses.replace(targets, base_rate=_checked_rate(targets.rate))


def forget_remade(trainer: Any) -> None:
    """Have loaders made as the model or its data make them."""
    vars(trainer.fit_loop._data_source).pop("dataloader", None)


def find_targets(trainer: Any, module: Any, package: str, options: FinderOptions) -> Targets:
    """Find what is to be tuned in a run.

    Raises:
        TuningError: There is no such attribute, or its value is no batch size or learning rate; or the model has
            parameters that its first step would initialize.
    """
    _check_initialized(module)
    data, source = trainer.datamodule, trainer.fit_loop._data_source
    name = options.batch_arg_name
    owners = " and ".join(type(owner).__name__ for owner in (module, data) if owner is not None)
    size = find_attribute(name, data, module) or _loader_keyword(name, module, data)
    loaders = None if source.is_module() else source.instance
    if loaders is not None:
        base_size = _size_of_loaders(loaders, package)
        if size is not None and size.get() != base_size:
            size = None  # of something else
    elif size is not None:
        base_size = _checked_size(name, size.get())
    else:
        made = _made_by(source, package) if name == _USUAL_SIZE and source.is_defined() else None
        if not loaders_in(made):
            raise TuningError(
                f"`{name}` is no attribute of {owners} nor of their hparams: set batch_arg_name= to the name of the"
                " batch size that train_dataloader() uses, or pass a DataLoader to fit()"
            )
        base_size = _size_of_loaders(made, package)
    rate = None
    if options.lr_arg_name is not None:
        rate = find_attribute(options.lr_arg_name, module, data)
        if rate is None and options.lr_scaling != "none" and options.lr_arg_name != _USUAL_RATE:
            raise TuningError(
                f"`{options.lr_arg_name}` is no attribute of {owners} nor of their hparams: set lr_arg_name= to the"
                " name of the learning rate, lr_arg_name=None to scale the optimizer's groups as they are, or"
                " lr_scaling='none' to leave the rate alone"
            )
    base_rate = None if rate is None else _checked_rate(rate)
    return Targets(
        package=package, size=size, rate=rate, loaders=loaders, base_size=base_size, base_rate=base_rate
    )  # fmt: skip


def _loader_keyword(name: str, module: Any, datamodule: Any | None) -> Attribute | None:
    """A size among the keywords that a model or its data keep for their loaders."""
    places = [
        _Place(holder=kept, key=name)
        for owner in (datamodule, module)
        if owner is not None
        for key, kept in vars(owner).items()
        if isinstance(kept, MutableMapping) and not key.startswith("_") and isinstance(kept.get(name), int)
    ]
    _check_unique(name, places)
    return Attribute(name=name, places=tuple(places)) if places else None


def _made_by(source: Any, package: str) -> Any:
    """The loaders that a model or its data make, which is done once more for the fit, from the same random states."""
    states = RandomStates.now()
    try:
        return import_from(package, "trainer.connectors.data_connector")._request_dataloader(source)
    finally:
        states.restore()


def _check_initialized(module: Any) -> None:
    lazy = next((name for name, value in module.named_parameters() if is_lazy(value)), None)
    if lazy is not None:
        raise TuningError(
            f"the parameter `{lazy}` is not initialized, and the first step of a trial would do that: run one forward"
            f" in {type(module).__name__}.setup() or configure_model()"
        )


def _checked_size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TuningError(f"`{name}` is {value!r}, a {type(value).__name__}: a batch size is an int, such as 32")
    if value < 1:
        raise TuningError(f"`{name}` is {value!r}: a batch size is an int of at least 1, such as 32")
    return value


def _checked_rate(rate: Attribute) -> float:
    value = rate.get()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TuningError(
            f"`{rate.name}` is {value!r}, a {type(value).__name__}: a learning rate is a number, such as 0.1; set"
            " lr_arg_name=None to scale the optimizer's groups as they are"
        )
    if not (math.isfinite(value) and value >= 0):
        raise TuningError(f"`{rate.name}` is {value!r}: a learning rate is finite and not negative, such as 0.1")
    return float(value)


def _size_of_loaders(loaders: Any, package: str) -> int:
    found = loaders_in(loaders)
    if not found:
        raise TuningError(
            f"the batch size of a {type(loaders).__name__} cannot be changed: pass a torch DataLoader to fit(), or"
            " build the loader in train_dataloader() from an attribute"
        )
    sizes = sizes_of(found)
    if len(set(sizes)) > 1:
        raise TuningError(f"the dataloaders have different batch sizes ({sizes}): tune one of them at a time")
    if not isinstance(sizes[0], int):
        resized(found[0], 1, package)  # raises, and says why
        raise TuningError("the dataloader has no batch_size: its data set or batch sampler makes the batches")
    size: int = sizes[0]
    resized(found[0], size, package)  # so that a loader that cannot be made again is an error now
    return size


_MARK = "_efficient_batch_size"
"""Attribute of a model: the result of its last tuning."""
_HOOK = "on_save_checkpoint"
_HYPERPARAMETERS = "hyper_parameters"  # of a checkpoint


def mark(module: Any, result: TuningResult, options: FinderOptions) -> None:
    """Note on a model what it was tuned to, so that no other finder scales its rate once more; its checkpoints say it.

    It is the module's: both it and its finder may travel to another process before the fit.
    """
    setattr(module, _MARK, result)
    own = getattr(module, _HOOK)
    if isinstance(own, functools.partial) and own.func is _save:  # of an earlier tuning
        own = own.args[0]
    # not an attribute by which a module would look for parameters; it goes with the model to other processes
    object.__setattr__(module, _HOOK, functools.partial(_save, own, result, options))


def _save(own: Callable[[Any], None], result: TuningResult, options: FinderOptions, checkpoint: dict[str, Any]) -> None:
    """In place of a model's hook: write the configured rate where the found size is not among the hyperparameters."""
    own(checkpoint)
    found = checkpoint.get(_HYPERPARAMETERS)
    if found is None or options.lr_arg_name is None or result.lr_factor == 1.0 or result.configured_lr is None:
        return
    if any(place.get() == result.batch_size for place in _places_in(found, options.batch_arg_name)):
        return
    checkpoint[_HYPERPARAMETERS] = made = copy.deepcopy(found)
    for place in _places_in(made, options.lr_arg_name):
        if place.get() == result.lr:
            place.set(result.configured_lr)


def tuning_of(module: Any) -> TuningResult | None:
    """What a model was last tuned to; None where it was not."""
    return getattr(module, _MARK, None)


def batch_of_rate(module: Any, targets: Targets) -> int | None:
    """The effective batch that a model's rate is for, where a tuning has set it; None where the user has."""
    result = tuning_of(module)
    is_its = result is not None and result.lr is not None and result.lr == targets.base_rate
    return result.effective_batch_size if result is not None and is_its else None


def rate_to_set(module: Any, targets: Targets, result: TuningResult) -> float | None:
    """The rate for another fit of a model that was tuned; None where the user has set one since."""
    if targets.rate is None or targets.base_rate == result.lr:
        return result.lr
    is_untouched = targets.base_rate == result.configured_lr and find_attribute(targets.rate.name, module) is None
    return result.lr if is_untouched else None


def warn_of_other_batch(trainer: Any, package: str, result: TuningResult) -> None:
    """Warn where a result is carried over to a run whose effective batch is another one."""
    effective = result.batch_size * trainer.world_size * accumulation_of(trainer)
    if effective != result.effective_batch_size:
        rank_zero(
            package,
            "warn",
            f"the batch size {result.batch_size} was tuned for an effective batch of {result.effective_batch_size},"
            f" which is now {effective} (other ranks or accumulation): the learning rate is not scaled again",
        )
