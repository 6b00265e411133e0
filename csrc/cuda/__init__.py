"""CUDA sources, compiled at run time."""
