"""FlashSpec: speculative decoding that can be seen, checked and measured."""

__version__ = "0.2.0"
