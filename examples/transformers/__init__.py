"""Training with the Hugging Face Trainer."""
