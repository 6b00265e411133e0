"""Measurements that anyone can rerun: ``python -m benchmarks SUITE``."""
