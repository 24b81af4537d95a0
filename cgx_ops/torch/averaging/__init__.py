"""Averages of tensors with state, of any caller: residuals, layers, rules, adaptive bits."""
