"""`outrider train auto`: all steps from a model to a measured head."""
