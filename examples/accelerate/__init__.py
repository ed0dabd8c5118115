"""Training with Hugging Face Accelerate."""
