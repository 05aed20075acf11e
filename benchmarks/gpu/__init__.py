"""Measurements that only an NVIDIA GPU can show."""
