"""Everything that makes a model of this repository, and `outrider train`, which makes draft heads for any target.

Nothing else in the repository imports this package. Run any part with `python -m training.PART --help`.
"""
