"""PowerSGD as a communication hook.

hook.py: the hooks; state.py: settings, factors and residuals; plan.py: which matrices a bucket has;
linear_algebra.py: one step of a power iteration.
"""
