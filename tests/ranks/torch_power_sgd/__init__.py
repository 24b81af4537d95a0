"""Checks of run_torch_hooks.py: PowerSGD."""
