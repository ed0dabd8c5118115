"""The parts of `EfficientBatchSizeFinder`: what it reads, tries, restores, sets and shows."""
