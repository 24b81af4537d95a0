"""Operators, functions, inductor, and the rewriting of compiled graphs."""
