"""Ways to store weights in fewer bits, one file each; a spec string such as `int4:group=64` names
one with its options.
"""
