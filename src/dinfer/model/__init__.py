"""Model families, one file each; `architectures[0]` of config.json chooses (see
`dinfer.loader.load`).
"""
