"""What the suite of changing shapes is made of."""
