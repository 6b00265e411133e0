"""Weights that are quantised in files: which tensors make one weight, and how it is dequantised.

Each format is one module: it recognises its weights in files (``find``), and its class describes
the tensors of one weight and computes the weight from them.  To add a format, write such a module,
and list it in ``formats``.
"""
