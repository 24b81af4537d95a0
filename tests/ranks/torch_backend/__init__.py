"""The cases of run_torch_backend.py."""
