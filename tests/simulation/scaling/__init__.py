"""Drafters scaled by the chart's rules, on virtual time."""
