"""Outer loops: DiLoCo and SparseLoCo."""
