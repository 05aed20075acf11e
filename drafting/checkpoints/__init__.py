"""Checkpoints of draft heads: what kind a folder holds, loading it against a target, and writing one.

Not here: the heads themselves (drafting.heads) and whole models (engine.model.load).

    target = load_target_weights("models/target")
    head = load_eagle3("models/eagle3", target, torch.bfloat16)
"""
