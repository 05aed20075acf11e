"""Answers of all APIs: made in their form, read back, and compared with what their receipt says."""
