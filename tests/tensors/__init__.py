"""Facts about tensors and ops."""
