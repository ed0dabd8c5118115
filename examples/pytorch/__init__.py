"""Plain PyTorch example."""
