"""Scikit-learn's handwritten digits as small colour images: real data that ships with the library."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_offload.errors import UnsupportedError

NUM_CLASSES = 10


def load_images(image_size: int, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Return all digits, upsampled and normalised.

    Args:
        image_size: Height and width to which the 8x8 originals are upsampled, in pixels.
        limit: Keep only this many samples.

    Returns:
        float32 images of shape (samples, 3, image_size, image_size) and int64 labels of shape (samples,), in NumPy's
        memory: on a CPU a data set among torch's tensors would count as memory of the device.

    Raises:
        UnsupportedError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UnsupportedError("the digits are scikit-learn's: pip install 'lightning-offload[demo]'") from error
    digits = load_digits()
    grey = torch.as_tensor(digits.images[:limit], dtype=torch.float32).unsqueeze(1)
    labels = torch.as_tensor(digits.target[:limit], dtype=torch.int64)
    grey = (grey - grey.mean()) / grey.std()
    images = F.interpolate(grey, size=(image_size, image_size), mode="bilinear", align_corners=False)
    return torch.from_numpy(images.repeat(1, 3, 1, 1).numpy().copy()), torch.from_numpy(labels.numpy().copy())


def make_loader(images: Tensor, labels: Tensor, *, batch_size: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader that shuffles the same way for the same `seed` and drops the ragged last batch."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        TensorDataset(images, labels),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        generator=generator,
    )
