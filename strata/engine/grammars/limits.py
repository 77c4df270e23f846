"""How much a grammar of a request may cost."""

from llguidance import LLParserLimits

# A state of the lexer takes 1 to 2 kB, and a hostile pattern makes as many as it may: 40 MB a request at most.
# The parser makes some 11,000 items a millisecond. Where a grammar reads a text of any words in several ways, a mask of
# 128,000 tokens takes more than llguidance's own 50,000.
LIMITS = LLParserLimits(max_lexer_states=20_000, step_max_items=250_000, verbose_errors=False)
