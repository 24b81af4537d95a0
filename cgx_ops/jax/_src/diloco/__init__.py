"""Outer loops: DiLoCo and SparseLoCo.

transform creates a loop from arguments. loop decides when fragments are sent and applied, fragments
how, and programs with which programs outside of jit. state is kept between steps. checks compares
shapes, and settings across processes.
"""
