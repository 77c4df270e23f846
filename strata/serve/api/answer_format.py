"""What the whole answer of a chat completion or completion has to be."""

from __future__ import annotations

from strata.serve.grammar import Grammar, response_grammar, structured_grammar
from strata.serve.schema.structured import FormatFields


def answer_grammar(body: FormatFields) -> Grammar | None:
    """The grammar that a request's fields ask for, None if they leave the answer free. Raises ApiError (400)."""
    asked = body.structured()
    return response_grammar(body.response_format) if asked is None else structured_grammar(*asked)
