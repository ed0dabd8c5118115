"""Who is trained: their packages, and what brings the plugin into their code."""

from __future__ import annotations

from dataclasses import dataclass

_CALLBACK = "callbacks=[OffloadCallback(budget=budget)]"
_STRATEGY = "strategy=OffloadStrategy(budget=budget)"
_FINDER = "callbacks=[EfficientBatchSizeFinder()]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One training.

    Attributes:
        name: Also of its module in `trainings`.
        title: For people.
        packages: The distributions that it needs.
        added: The code that brings the plugin in.
        training: The module in `trainings`, where it has another name.
        finds: How much data there is for a finder of the batch size, by that of a run within a budget; 0 without one.
        long: The same of a longer run.
        has_size: Whether a finder can set its batch size.
    """

    name: str
    title: str
    packages: tuple[str, ...] = ()
    added: str
    training: str = ""
    finds: int = 0
    long: int = 0
    has_size: bool = True


_WITHIN_BUDGETS = (
    Client(
        name="llama",
        title="Llama by transformers' Trainer",
        packages=("transformers",),
        added=f"Trainer(..., {_CALLBACK})",
    ),
    Client(
        name="t5",
        title="T5 by transformers' Trainer",
        packages=("transformers",),
        added=f"Trainer(..., {_CALLBACK})",
    ),
    Client(
        name="whisper",
        title="Whisper by transformers' Trainer",
        packages=("transformers",),
        added=f"Trainer(..., {_CALLBACK})",
    ),
    Client(
        name="trl_sft",
        title="Llama with LoRA by TRL's SFTTrainer",
        packages=("trl", "peft", "datasets"),
        added=f"SFTTrainer(..., {_CALLBACK})",
    ),
    Client(
        name="sentences",
        title="sentence-transformers' trainer, MultipleNegativesRankingLoss",
        packages=("sentence-transformers", "datasets"),
        added=f"SentenceTransformerTrainer(..., {_CALLBACK})",
    ),
    Client(
        name="sentences_by_hand",
        title="the same, a step around its `compute_loss`",
        packages=("sentence-transformers", "datasets"),
        added="with memory.step(inputs): return super().compute_loss(model, inputs, **keywords)",
    ),
    Client(
        name="unet",
        title="diffusers' UNet2D and averaged weights by Accelerate",
        packages=("diffusers", "accelerate"),
        added="with prepare_offload(accelerator, model, budget=budget): ...",
    ),
    Client(
        name="graphs",
        title="PyTorch Geometric's GIN by LightningDataset",
        packages=("torch-geometric", "lightning"),
        added=f"Trainer(..., {_STRATEGY})",
    ),
    Client(
        name="scvi_counts",
        title="scvi-tools' SCVI",
        packages=("scvi-tools",),
        added=f"model.train(..., {_STRATEGY})",
    ),
    Client(
        name="deepar",
        title="GluonTS' DeepAR",
        packages=("gluonts",),
        added='DeepAREstimator(..., trainer_kwargs={"strategy": OffloadStrategy(budget=budget)})',
    ),
    Client(
        name="tft",
        title="pytorch-forecasting's Temporal Fusion Transformer",
        packages=("pytorch-forecasting",),
        added=f"Trainer(..., {_STRATEGY})",
    ),
)

_FINDING = (
    Client(
        name="tft_size",
        title="pytorch-forecasting's Temporal Fusion Transformer: batch size",
        packages=("pytorch-forecasting",),
        added=f"Trainer(..., {_FINDER})",
        training="tft",
        finds=4,
    ),
    Client(
        name="nhits_size",
        title="pytorch-forecasting's N-HiTS: batch size",
        packages=("pytorch-forecasting",),
        added=f"Trainer(..., {_FINDER})",
        training="nhits",
        finds=4,
    ),
    Client(
        name="scvi_size",
        title="scvi-tools' SCVI: batch size",
        packages=("scvi-tools",),
        added=f"model.train(..., {_FINDER})",
        training="scvi_counts",
        finds=4,
    ),
    Client(
        name="graphs_size",
        title="PyTorch Geometric's GIN by LightningDataset: batch size",
        packages=("torch-geometric", "lightning"),
        added=f"Trainer(..., {_FINDER})",
        training="graphs",
        finds=4,
    ),
    Client(
        name="deepar_size",
        title="GluonTS' DeepAR: batch size",
        packages=("gluonts",),
        added='DeepAREstimator(..., trainer_kwargs={"callbacks": [EfficientBatchSizeFinder()]})',
        training="deepar",
        finds=1,
        has_size=False,
    ),
    Client(
        name="molecules_size",
        title="molecules with batches and a collation of their own, as chemprop's: batch size",
        packages=("lightning",),
        added=f"Trainer(..., {_FINDER})",
        training="molecules",
        finds=4,
    ),
    Client(
        name="command_line_size",
        title="a project of LightningCLI: batch size",
        packages=("lightning", "jsonargparse"),
        added='LightningCLI(..., trainer_defaults={"callbacks": [EfficientBatchSizeFinder()]})',
        training="command_line",
        finds=4,
        long=75,
    ),
    Client(
        name="llama_size",
        title="Llama by transformers' Trainer, made by a function: batch size",
        packages=("transformers", "accelerate"),
        added="@find_efficient_batch_size(starting_batch_size=16)",
        finds=2,
    ),
)
CLIENTS = (*_WITHIN_BUDGETS, *_FINDING)

REHEARSAL = Client(name="loop", title="a loop in plain PyTorch", added="with memory.step(batch): ...")
"""What tries the harness, with no package but torch."""
