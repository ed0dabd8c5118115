"""Who is trained: their packages, and what brings the plugin into their code."""

from __future__ import annotations

from dataclasses import dataclass

_CALLBACK = "callbacks=[OffloadCallback(budget=budget)]"
_STRATEGY = "strategy=OffloadStrategy(budget=budget)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One training.

    Attributes:
        name: Of its module in `trainings`.
        title: For people.
        packages: The distributions that it needs.
        added: The code that brings the plugin in.
    """

    name: str
    title: str
    packages: tuple[str, ...] = ()
    added: str


CLIENTS = (
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

REHEARSAL = Client(name="loop", title="a loop in plain PyTorch", added="with memory.step(batch): ...")
"""What tries the harness, with no package but torch."""
