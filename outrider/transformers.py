"""Drafts for transformers: `model.generate(..., custom_generate=outrider.transformers.Drafts(model, drafters=[...]))`."""

from outrider.plugins.transformers import Drafts

__all__ = ["Drafts"]
