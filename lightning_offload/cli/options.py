"""Options that several commands share, as Typer reads them from annotations.

Those of the step to plan are the fields of :class:`PlanOptions`; :func:`planning` gives them to a command.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, get_type_hints

import typer

POLICY_NAMES = (
    "auto, keep-all, all-swap, all-recompute, save-on-cpu, checkpoint, checkpoint-sqrt, vdnn-all, vdnn-conv, vdnn-dyn, "
    "superneurons, swap-out-in, layrub, layup, cpu-offload, accudnn, capuchin, checkmate, dtr, pofo"
)
"""Written out: whoever asks for help does not wait until the planner is imported."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: bytes, seconds, and the same keys always.")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The step to plan, as a command was given it; cf. the options' help."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:ATTRIBUTE",
            help="A torch.nn.Module, LightningModule or model of transformers, or a class or function without required "
            "arguments that makes one. FILE.py:ATTRIBUTE works too; the current directory is searched first.",
        ),
    ]
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="[NAME=][DTYPE:]SHAPE",
            help="An input without its batch dimension: 3x224x224, int64:128, labels=int64: (one number a sample). "
            "Once for each input. Or MODULE:FUNCTION, which makes all inputs for a batch size.",
        ),
    ] = None
    input_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Type of inputs that name none. [default: int64 for token ids, else --dtype]"
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(metavar="N", help="Samples in the batch.")] = 64
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Peak of device memory allowed: 12GiB, 500MB, or 0.8 of the device. "
            "[default: all that the device has]",
        ),
    ] = None
    host_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most host memory for swapped tensors. [default: no limit]")
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A device of the catalogue (see `devices`), or FILE.json with a device spec. [default: the GPU here]",
        ),
    ] = None
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="What the model is held and computed in: float32, float16 or bfloat16.")
    ] = "float32"
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="As the Trainer's: bf16-mixed or 16-mixed run forward under autocast."),
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:ATTRIBUTE",
            help="What the loop computes of the model's output and the last --input, such as "
            "torch.nn.functional:cross_entropy. [default: the model's own loss, or the sum of its outputs]",
        ),
    ] = None
    chunked_loss: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER",
            help="Compute the cross-entropy in chunks of rows, as chunked_loss=... does: the layer that makes the "
            "logits, or True for the one that the model itself names. [default: as the model computes it]",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose state lies on the device: none, sgd (none), momentum (1 x parameters), adam or adamw (2 x), or "
            "configured, that of a LightningModule itself. [default: configured where there is one, else momentum]",
        ),
    ] = None
    accumulate: Annotated[
        int, typer.Option(metavar="N", help="Micro-batches of one update, whose gradients stay on the device.")
    ] = 1
    policy: Annotated[
        str, typer.Option(metavar="NAME", help=f"Who plans: {POLICY_NAMES}. `compare` shows them side by side.")
    ] = "auto"
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep", metavar="PATTERN", help="Modules whose saved tensors stay on the device, such as 'lm_head*'."
        ),
    ] = None


def planning(
    *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a step to plan, in the place of its parameter ``options``.

    What a command declares itself under the name of one that it has stands for that one.

    Args:
        only: Names of the options that it has; by default all.
        without: Names of those that it has not.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = only or [field.name for field in dataclasses.fields(PlanOptions) if field.name not in without]
        own = inspect.signature(command, eval_str=True).parameters
        added = _of_step([name for name in names if name not in own])
        parameters = [each for name in own for each in (added if name == "options" else [own[name]])]

        @functools.wraps(command)
        def call(**given: Any) -> None:
            options = PlanOptions(**{name: given[name] for name in names})
            command(**{name: options if name == "options" else given[name] for name in own})

        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def _of_step(names: Collection[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(PlanOptions, include_extras=True)
    parameters = inspect.signature(PlanOptions).parameters
    return [parameters[name].replace(annotation=hints[name]) for name in names]
