"""Optax transformations that average gradients or momenta, one file for each, with its state.

base derives PartitionSpecs and consolidation from the fields that a state declares as per device.
"""
