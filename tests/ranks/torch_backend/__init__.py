"""The checks of run_torch_backend.py."""
