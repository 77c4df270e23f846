"""How much a grammar of a request may cost."""

from llguidance import LLParserLimits

# A state of the lexer takes 1 to 2 kB, and a hostile pattern makes as many as it may: 40 MB a request at most.
LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
