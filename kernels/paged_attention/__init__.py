"""Attention of ragged rows over a paged key/value cache: one file per implementation, one signature."""
