"""Gradients of a loss, reduced compressed.

value_and_grad is the public file; sharded is its case outside of shard_map. device_gradients
differentiates on each device; statistics measures gradients for adaptive bits.
"""
