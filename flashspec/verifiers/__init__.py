"""Verification: which drafted tokens stay and what is emitted next.

`rules` holds the formulas, `reference` runs them in PyTorch and is the law that every other backend is compared with.
Nothing here knows models, caches or text.
"""
