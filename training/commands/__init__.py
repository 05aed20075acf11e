"""The `outrider train` commands."""
