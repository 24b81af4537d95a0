"""The checks of run_torch_deep_gradient.py."""
