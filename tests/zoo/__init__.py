"""A zoo of small models and training steps that every exactness test runs through."""
