"""The checks of run_torch_fsdp.py."""
