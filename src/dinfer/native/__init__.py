"""Kernels in C++ for x86 CPUs, compiled at first use: the dense stack and the head, a call each.

Each has its plain form elsewhere, which runs where these cannot: no compiler, another CPU.
"""
