"""Tests of the adapters for Accelerate, the Hugging Face Trainer and Fabric."""
