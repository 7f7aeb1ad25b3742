"""Iterations: which window to denoise next. One file each; `Iteration.window(seq) -> Window |
None`.
"""
