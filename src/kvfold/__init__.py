"""kvfold: every distinct byte of a KV cache is stored once, and every rank gets its own back."""

__version__ = "0.1.0"
