"""Llama 4's modules for packed batches: the chunks and query scales of its attention, and its mixtures of experts."""
