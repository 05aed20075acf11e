"""The cost of a step of a model with recurrent layers, against transformers'."""
