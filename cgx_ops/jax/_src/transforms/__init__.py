"""Optax transformations that average gradients or momenta, a file for each, with its state.

base derives specs and consolidation from the fields that a state declares as per device.
"""
