"""Everything that makes a model of this repository: corpus, tokenizer, training, distillation, expansion.

Nothing else in the repository imports this package. Run any part with `python -m training.PART --help`.
"""
