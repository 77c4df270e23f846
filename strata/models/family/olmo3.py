"""OLMo 3 (Team OLMo et al. 2025): OLMo 2 of which three layers in four see a window and keep plain rotary angles."""

from __future__ import annotations

from strata.models.family.olmo2 import Olmo2


class Olmo3(Olmo2):
    """`config.windows` says which layers have a window; those are rotated by `config.window_rope`."""
