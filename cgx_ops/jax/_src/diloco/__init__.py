"""Outer loops: DiLoCo and SparseLoCo.

transform makes a loop from arguments; loop decides when fragments are sent and applied, fragments
how, programs by which programs outside of jit. state is what lasts between steps; checks compares
shapes, and settings across processes.
"""
