"""Operations by subject, `op` the registry. A file has one, or a few that share their mathematics: what it computes,
its reference, its cost, its kernels; long kernels and those with gradients stand beside it. Imports only `hardware`.
"""
