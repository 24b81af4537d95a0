"""Compressed gradients of a loss.

value_and_grad has the public functions; sharded is its case outside of shard_map. device_gradients
differentiates on each device; statistics measures gradients for adaptive bits.
"""
