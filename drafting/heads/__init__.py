"""Trained draft heads as plain torch modules: Medusa, MLP speculator, EAGLE-1/2 and EAGLE-3.

A head knows nothing of paged caches: its attention function's needs pass through as keyword arguments. Not here:
checkpoints (drafting.checkpoints), drafting (drafting.methods), training (training).
"""
