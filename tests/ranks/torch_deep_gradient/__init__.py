"""Checks of run_torch_hooks.py: Deep Gradient Compression."""
