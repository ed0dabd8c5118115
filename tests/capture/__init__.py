"""Recording and measuring steps."""
