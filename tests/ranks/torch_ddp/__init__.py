"""The checks of run_torch_ddp.py."""
