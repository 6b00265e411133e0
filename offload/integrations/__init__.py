"""Integrations with the training loops of frameworks: one module each, imported by name.

``transformers`` is for Trainer and its subclasses; ``accelerate`` and ``lightning`` are for these
frameworks.
"""
