"""Drafters: who guesses the next tokens. One small protocol (`base`), one file a drafter.

A drafter says what it would continue with; sampling, q and randomness belong to the engine.
"""

from flashspec.drafters.base import Drafter
from flashspec.drafters.early_exit import early_exit
from flashspec.drafters.lookup import LookupDrafter
from flashspec.drafters.lookup_else import LookupElseDrafter
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.plain import PlainDrafter

__all__ = ["Drafter", "LookupDrafter", "LookupElseDrafter", "ModelDrafter", "PlainDrafter", "early_exit"]
