"""Trained draft heads as plain torch modules: Medusa, MLP speculator, EAGLE-1/2 and EAGLE-3.

Not here: reading and writing checkpoints (drafter_service.checkpoints), drafting with a head
(drafter_service.methods) and training one (training). A head knows nothing of paged caches; what its attention
function needs is passed through as keyword arguments.
"""
