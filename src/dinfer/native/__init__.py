"""Kernels in C++ for CPUs, compiled at first use: the stack and the head, a call each.

Each has its plain form elsewhere, which runs where these cannot: no compiler, another CPU.
"""
