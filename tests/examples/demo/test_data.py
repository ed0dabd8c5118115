"""The demo's data: real digits, the same in every run."""

from __future__ import annotations

import torch

from examples.demo.data import load_images, make_loader


def test_digits_become_normalised_colour_images():
    """Shape, dtype and labels are those of ten classes of colour images."""
    images, labels = load_images(16)
    assert images.shape == (1797, 3, 16, 16)
    assert images.dtype == torch.float32
    assert labels.unique().tolist() == list(range(10))
    assert abs(images.mean()) < 0.1
    assert torch.equal(images[:, 0], images[:, 2])


def test_loader_shuffles_the_same_way_for_the_same_seed():
    """Two loaders of one seed give the same batches, all of full size."""
    images, labels = load_images(8, limit=22)
    first, second = (
        list(make_loader(images, labels, batch_size=5, seed=3)),
        list(make_loader(images, labels, batch_size=5, seed=3)),
    )
    assert [len(batch[1]) for batch in first] == [5, 5, 5, 5]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0][1], labels[:5])
