"""The checks of run_torch_power_sgd.py."""
