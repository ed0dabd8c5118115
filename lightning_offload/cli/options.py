"""Options that several commands share, as Typer reads them from annotations."""

from __future__ import annotations

from typing import Annotated

import typer

POLICY_NAMES = (
    "auto, keep-all, all-swap, all-recompute, save-on-cpu, checkpoint, checkpoint-sqrt, vdnn-all, vdnn-conv, vdnn-dyn, "
    "superneurons, swap-out-in, layrub, layup, cpu-offload, accudnn, capuchin, checkmate, dtr, pofo"
)
"""Written out: whoever asks for help does not wait until the planner is imported."""

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:ATTRIBUTE",
        help="A torch.nn.Module, LightningModule or model of transformers, or a class or function without required "
        "arguments that makes one. FILE.py:ATTRIBUTE works too; the current directory is searched first.",
    ),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="[NAME=][DTYPE:]SHAPE",
        help="An input without its batch dimension: 3x224x224, int64:128, labels=int64: (one number a sample). Once "
        "for each input. Or MODULE:FUNCTION, which makes all inputs for a batch size.",
    ),
]
InputDtypeOption = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="Type of inputs that name none. [default: int64 for token ids, else --dtype]"),
]
BatchSizeOption = Annotated[int, typer.Option(metavar="N", help="Samples in the batch.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Peak of device memory allowed: 12GiB, 500MB, or 0.8 of the device. [default: all that the device has]",
    ),
]
HostBudgetOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most host memory for swapped tensors. [default: no limit]")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A device of the catalogue (see `devices`), or FILE.json with a device spec. [default: the GPU here]",
    ),
]
DtypeOption = Annotated[
    str, typer.Option(metavar="DTYPE", help="What the model is held and computed in: float32, float16 or bfloat16.")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="As the Trainer's: bf16-mixed or 16-mixed run forward under autocast."),
]
AccumulateOption = Annotated[
    int, typer.Option(metavar="N", help="Micro-batches of one update, whose gradients stay on the device.")
]
LossOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:ATTRIBUTE",
        help="What the loop computes of the model's output and the last --input, such as "
        "torch.nn.functional:cross_entropy. [default: the model's own loss, or the sum of its outputs]",
    ),
]
ChunkedLossOption = Annotated[
    str | None,
    typer.Option(
        metavar="LAYER",
        help="Compute the cross-entropy in chunks of rows, as chunked_loss=... does: the layer that makes the logits, "
        "or True for the one that the model itself names. [default: as the model computes it]",
    ),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Whose state lies on the device: none, sgd (none), momentum (1 x parameters), adam or adamw (2 x), or "
        "configured, that of a LightningModule itself. [default: configured where there is one, else momentum]",
    ),
]
PolicyOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"Who plans: {POLICY_NAMES}. `compare` shows them side by side.")
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep", metavar="PATTERN", help="Modules whose saved tensors stay on the device, such as 'lm_head*'."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: bytes, seconds, and the same keys always.")]
