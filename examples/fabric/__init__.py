"""Training with Lightning Fabric."""
