"""Makes every model of this repository, and provides `outrider train`, which makes draft heads for any target.

Nothing else in the repository imports this package. Run any part with `python -m outrider.training.PART --help`.
"""
