"""Frameworks' own training loops, with overspill under them: one module each, imported by name.

``transformers`` is for Trainer and for those that build on it, ``accelerate`` and ``lightning`` are
for those.
"""
