"""Llama 4's modules for packed batches: what its attention does not tell, and its mixtures of experts."""
