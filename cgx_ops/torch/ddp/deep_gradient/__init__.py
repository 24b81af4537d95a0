"""Deep Gradient Compression as a communication hook.

hook.py: the hook; state.py: settings, momenta and residuals; hosts.py: sums within a host.
"""
