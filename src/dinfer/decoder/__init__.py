"""Decoders: which proposed tokens to commit. One file each; `commit(proposal, masked, states) ->
Commit`.
"""
