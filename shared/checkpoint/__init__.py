"""Reads what a checkpoint folder says about itself; nothing here loads torch."""
