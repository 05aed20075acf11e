"""Recurrent layers: one folder per recurrence, and the values that all of them share (rows)."""
