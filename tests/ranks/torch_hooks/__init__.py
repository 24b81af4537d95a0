"""The checks of run_torch_hooks.py."""
