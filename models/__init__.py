"""Models of the demo family, one folder each; `make/` makes them. Not in the wheel."""
