"""Optax transformations that reduce gradients."""
