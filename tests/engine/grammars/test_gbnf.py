"""GBNF is free of context over characters: outputs and masks are those of a recognizer that reads by the book."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from strata.engine.grammars.gbnf import read_gbnf
from strata.engine.grammars.limits import LIMITS
from strata.engine.grammars.structured_outputs import StructuredOutputsParams, join_entries
from strata.serve.grammar_worker import TOKENIZER, what_is_wrong
from tests.engine.grammars.plain_grammars import CHARACTERS, PlainGrammar, RandomGrammar, plain

# With llguidance's canonical ids a mask may be the one id of what has to follow; here it is to show all that may.
ALL_IDS = '%llguidance {"no_forcing": true}\n'


class Vocabulary:
    """Tokens of one byte and of several, some of which end within a character; llguidance's view of them."""

    def __init__(self, single: Iterable[int], words: Iterable[str]) -> None:
        cut = ["bé".encode()[:2], "aé".encode()[1:], "é\n".encode()[1:]]
        self.tokens = list(dict.fromkeys([*(bytes([byte]) for byte in single), *cut, *map(str.encode, words)]))
        self.end = len(self.tokens)
        self.tokens.append(b"<end>")
        self.eos_token_id, self.bos_token_id, self.special_token_ids = self.end, None, (self.end,)
        self.seen = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes | str) -> list[int]:
        written = text.encode() if isinstance(text, str) else text
        return [self.tokens.index(bytes([byte])) for byte in written]


def matcher_of(gbnf: str, tokenizer: LLTokenizer) -> LLMatcher:
    part = StructuredOutputsParams(grammar=gbnf).entry()
    grammar = join_entries({**part, "lark_grammar": ALL_IDS + part["lark_grammar"]})
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allowed(matcher: LLMatcher) -> set[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert not matcher.is_error(), matcher.get_error()
    return {id for id in range(mask.bit_length()) if mask >> id & 1}


def right_ids(grammar: PlainGrammar, vocabulary: Vocabulary, text: bytes) -> set[int]:
    """The tokens that may follow a text, and the end."""
    right = {id for id, token in enumerate(vocabulary.tokens[:-1]) if grammar.bytes_go_on(text + token)}
    may_end = text.decode(errors="ignore").encode() == text and grammar.accepts(text.decode())
    return right | {vocabulary.end} if may_end else right


def assert_masks_are(matcher: LLMatcher, grammar: PlainGrammar, vocabulary: Vocabulary, seed: int, steps: int) -> None:
    """Along an output of any tokens that may come."""
    chance, text = random.Random(seed), b""
    for _ in range(steps):
        right = right_ids(grammar, vocabulary, text)
        assert allowed(matcher) == right, text
        assert matcher.is_accepting() == (vocabulary.end in right), text
        going = sorted(right - {vocabulary.end})
        if not going:
            break
        id = chance.choice(going)
        matcher.consume_token(id)
        text += vocabulary.tokens[id]


def assert_masks_along(matcher: LLMatcher, grammar: PlainGrammar, vocabulary: Vocabulary, text: str) -> None:
    """Along the bytes of a text."""
    for place, id in enumerate(vocabulary(text)):
        assert allowed(matcher) == right_ids(grammar, vocabulary, text.encode()[:place]), (text, place)
        matcher.consume_token(id)
    assert allowed(matcher) == right_ids(grammar, vocabulary, text.encode()), text


RANDOM = Vocabulary(
    sorted({byte for one in CHARACTERS for byte in one.encode()}),
    ["ab", "ba", "aa", "aab", "éa", "aé", "€a", "a\n", '"a', "bbbb"],
)


@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_grammars(part: int) -> None:
    empty = 0
    for seed in range(100 * part, 100 * part + 100):
        made = RandomGrammar(seed)
        if not made.plain.has_texts:
            empty += 1
            with pytest.raises(ValueError, match="nothing satisfies the grammar"):
                StructuredOutputsParams(grammar=made.gbnf).to_grammar()
            continue
        matcher = matcher_of(made.gbnf, RANDOM.seen)
        for walk in range(2):
            assert_masks_are(matcher.deep_copy(), made.plain, RANDOM, walk, steps=5)
    assert empty < 20


# Of the kinds that llama.cpp ships (its folder grammars), with what each takes and what it does not.
ARITHMETIC = r"""
root  ::= (sum "=" ws term "\n")+
sum   ::= term ([-+*/] term)*
term  ::= name | number | "(" ws sum ")" ws
name  ::= [a-z] [a-z0-9_]* ws
number ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
C = r"""
root ::= (function)*
function ::= type name "(" argument? ")" "{" statement* "}"
type ::= "int" ws | "float" ws | "char" ws
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
argument ::= type name
statement ::=
    ( type name ws "=" ws sum ";" ) |
    ( name ws "=" ws sum ";" ) |
    ( name ws "(" values? ")" ";" ) |
    ( "return" ws sum ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "for" "(" first ";" ws condition ";" ws next ")" "{" statement* "}" ) |
    ( "if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")? ) |
    ( lineComment ) |
    ( longComment )
first ::= type name ws "=" ws sum | name ws "=" ws sum
next ::= name ws "=" ws sum
condition ::= sum relation sum
relation ::= ("<=" | "<" | "==" | "!=" | ">=" | ">")
sum ::= product (("+" | "-") product)*
product ::= value(("*" | "/") value)*
value ::= name | number | minus | call | inParentheses
minus ::= "-" value
call ::= name "(" values? ")"
inParentheses ::= "(" ws sum ws ")"
values ::= sum ("," ws sum)*
number ::= [0-9]+
lineComment ::= "//" [^\n]* "\n"
longComment ::= "/*" ( [^*] | ("*" [^/]) )* "*/"
ws ::= ([ \t\n]+)
"""
CHESS = r"""
# Moves as a list; the first has the number 1.
root   ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move   ::= (pawn | piece | castle) [+#]?
piece  ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
ENGLISH = r"""
root ::= char+ ([ \t\n] char+)*
char ::= letter | digit | mark
letter ::= [a-zA-Z]
digit ::= [0-9]
mark ::= [!"#$%&'()*+,-./:;<=>?@[\\\]^_`{|}~]
"""
JAPANESE = r"""
root ::= char+ ([ \t\n] char+)*
char ::= hiragana | katakana | mark | kanji
hiragana ::= [ぁ-ゟ]
katakana ::= [\u30A1-ヿ]
mark ::= [、-\U0000303E]
kanji ::= [一-鿿]
"""
VALUES = r"""
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array ::=
  "[" ws (
    value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# At most a blank, or a line that is indented.
ws ::= | " " | "\n" [ \t]{0,20}
"""
JSON = f"root ::= object\n{VALUES}"
JSON_ARRAY = f"""root ::= list
list ::=
  "[\\n" ws (
    value
    (",\\n" ws value)*
  )? "]"
{VALUES}"""
LIST = r"""root ::= item+
# No kind of line end is within an item.
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""

SHIPPED = {
    "arithmetic": (
        ARITHMETIC,
        ["a = 1\n", "(a+b2)*3 -44 /x= 12 \n", "x=y\n\nz =(\n1 )\n\n\n"],
        ["a = 1", "a+ = 1\n", "(a=1\n", "", "2a=1\n"],
    ),
    "c": (
        C,
        [
            "int main(){return  1;}",
            "",
            "float f(int x){int returned  = 1+2*(  y+z  );while(x<=10){x = g(x,  -3);}}",
            "char  c(){/* a ** b */if(a==b){// no\n}else{g (1);}for(int i = 0; i<9; i = i+1){}}int d(){}",
        ],
        ["int main(){return1;}", "intx(){}", "int f(){a  = 1}", "int f(){/* a }", "int f(){if(a=b){}}"],
    ),
    "chess": (
        CHESS,
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O-O bxa8=Q#\n10. R1xd4+ O-O\n12. a1 a2\n"],
        ["1. e4 e5\n", "1. e4\n2. Nf3 Nc6\n", "1. i4 e5\n2. a1 a2\n", "1. e4 e5\n02. a1 a2\n"],
    ),
    "english": (ENGLISH, ["A word, and 2 more!", "a\tb\nc\\[d]^e-"], ["", " a", "a  b", "é", "a "]),
    "japanese": (JAPANESE, ["これは、カタカナ。 漢字", "〾ヿ鿿ぁ"], ["", "abc", "これ  は", "゠", "〿"]),
    "json": (
        JSON,
        ['{"a":1}', '{"a":[1, -2.50e+3,{"b":null}],"c\\u00e9\\n":"é😀 \\"" } ', '{\n  "a": true}\n'],
        ["[1]", '{"a":01}', '{"a":1,}', '{"a":"\t"}', '{"a": \n1}', '{"a":1'],
    ),
    "json_arr": (JSON_ARRAY, ["[\n]", '[\n1,\n {"a":"b]"},\n\n[ ]\n]'], ["[]", "[\n1,2]", "[\n] ", "{}"]),
    "list": (LIST, ["- a\n", "- one - thing\n- é😀\n"], ["", "- a", "-a\n", "- \n", "- a\u2028b\n", "- a\x85\n"]),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_grammars_that_llama_cpp_ships(name: str) -> None:
    gbnf, right, wrong = SHIPPED[name]
    grammar = StructuredOutputsParams(grammar=gbnf).to_grammar()
    assert what_is_wrong(grammar) is None
    reference = plain(read_gbnf(gbnf))
    for text in (*right, *wrong):
        matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
        taken = matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()
        assert taken == (text in right) == reference.accepts(text), text


WORDS = Vocabulary(
    range(256),
    [
        "int",
        "return",
        "<=",
        "1. ",
        " =",
        " (",
        "\n\n",
        "(a",
        '":',
        '"a',
        "], ",
        '\\"',
        "- ",
        "いま",
        "。\n",
        "e4 ",
        " d6\n",
    ],
)


@pytest.mark.parametrize("name", SHIPPED)
def test_masks_along_the_grammars_that_llama_cpp_ships(name: str) -> None:
    gbnf, right, _ = SHIPPED[name]
    reference = plain(read_gbnf(gbnf))
    matcher = matcher_of(gbnf, WORDS.seen)
    for seed in range(3):
        assert_masks_are(matcher.deep_copy(), reference, WORDS, seed, steps=8)
    assert_masks_along(matcher, reference, WORDS, right[-1][:30])


@pytest.mark.parametrize(
    ("gbnf", "right", "wrong"),
    [
        ('root ::= word "s"\nword ::= [a-z]+', ["as", "sss", "words"], ["s", "a", "sa"]),
        (r'root ::= "\U0001F600" | [\u00e9-\u00eb]+ "\x41"', ["😀", "éêA"], ["A", "\U0001f601", "ìA"]),
        (r'root ::= "\"\\\[\]\-\t\r\n" [\]\-^"] [a-]', ['"\\[]-\t\r\n]a', '"\\[]-\t\r\n^-'], ['"\\[]-\t\r\n]b']),
        ("root ::= .{2}", ["ab", "é😀", "\n\x00"], ["a", "abc"]),
        ('root ::= ("a"\n  | "b" # or\n "c") | \n "d"', ["a", "bc", "d"], ["ac", "c"]),
        ('root::="a"(b)+\nb ::="b" *"c"', ["ac", "abbcc"], ["a", "abb"]),
        ('root ::= root "b" | "a" | root', ["a", "abb"], ["", "b", "ba"]),
        ('root ::= a-1{2,3}\r\na-1 ::= "x"', ["xx", "xxx"], ["x", "xxxx"]),
        ('root ::= "a" | \nother ::= root', ["a", ""], ["aa"]),
        ('root ::= "<" | "<=" "x" | name "=" name ::= "<"? [a-z]', ["<", "<=x", "<a=", "z="], ["<=", "="]),
        ('root ::= (d | "b"{0} "") "c"\nd ::= d d | "d"', ["c", "ddc"], ["", "bc", "cd"]),
        (
            'root ::= s\ns ::= s "+" s | s "!" | "-" s | "(" s ")" | "n"',
            ["-n!+--(n+n)!!", "n"],
            ["n-", "!n", "n+", "(n"],
        ),
        ('root ::= s\ns ::= s? "a" | s "?" s ":" s', ["a", "aa", "a?aa:a"], ["", "a?a", "a:a"]),
        ('root ::= "a" endless | "b"\nendless ::= "c" endless', ["b"], ["a", "ac"]),
    ],
)
def test_what_grammars_mean(gbnf: str, right: list[str], wrong: list[str]) -> None:
    grammar = StructuredOutputsParams(grammar=gbnf).to_grammar()
    for text in (*right, *wrong):
        ids = list(text.encode())
        matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == (text in right), text


@pytest.mark.parametrize(
    ("gbnf", "match"),
    [
        ('a ::= "b"', "it has no rule named root"),
        ("root ::= other", "rule root names other, and there is no such rule"),
        ('root ::= "a', "line 1, column 12: it ends within a literal"),
        ("root ::= [a", "it ends within a literal or a class"),
        ('root ::= "a"\nb ::= "\\q"', r"line 2, column 9: \\q is no escape"),
        (r'root ::= "\U00110000"', "U00110000 is no character"),
        (r'root ::= "\uD83D\uDE00"', r"uD83D is half a character"),
        ("root ::= [z-a]", "a range of characters ends before it begins"),
        ("root ::= []", "has no character"),
        ('root ::= ("a"', r"a \) was expected"),
        ('root ::= "a")', r"'\)' was not expected"),
        ('root ::= | * "a"', "there is nothing before"),
        ('root ::= "a"{2,1}', "ends before it begins"),
        ('root ::= "a"{x}', "a number of times was expected"),
        ('root ::= "a"{99999}', "more often than 10,?000"),
        ("root ::= <think>", "write their text as a literal"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nests deeper than 64"),
        ('root ::= "a"' + "*" * 5000, "nests deeper than 64"),
        ('root ::= "a" root', "nothing satisfies the grammar"),
    ],
)
def test_what_is_no_grammar_is_told_with_its_place(gbnf: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        StructuredOutputsParams(grammar=gbnf).to_grammar()
    assert "\n" not in str(caught.value)


def test_a_lark_grammar_that_spells_a_rule_of_gbnf_is_lark() -> None:
    grammar = StructuredOutputsParams(grammar='start: "a ::= " /[a-z]/').to_grammar()
    assert what_is_wrong(grammar) is None


@pytest.mark.parametrize(
    "rule",
    [
        'item "," list | item',
        'item ("," list)?',
        'list "," item | item',
        'list "," list | item',
        'list list | item ","?',
    ],
    ids=["right", "optional", "left", "both", "without marks"],
)
def test_lists_go_on_however_they_are_written(rule: str) -> None:
    grammar = StructuredOutputsParams(grammar=f"root ::= list\nlist ::= {rule}\nitem ::= [a-z]+").to_grammar()
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
    ids = list(b"ab,c," * 2000)
    assert matcher.try_consume_tokens(ids) == len(ids), matcher.get_error()
    assert matcher.try_consume_tokens(list(b"z")) == 1
    assert matcher.is_accepting()


DOUBLING = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(300))
NAMES_IN_A_ROW = "\n".join(f"r{n} ::= r{n + 1}" for n in range(1000))
RULES_IN_A_ROW = "\n".join(f'r{n} ::= r{n + 1} "x" | "y" r{n + 1}' for n in range(700))


@pytest.mark.parametrize(
    "gbnf",
    [
        f'root ::= r0\n{NAMES_IN_A_ROW}\nr1000 ::= "z"',
        f'root ::= r0\n{RULES_IN_A_ROW}\nr700 ::= "z"',
        f'root ::= r0 "x"\n{DOUBLING}\nr300 ::= ""',
        f'root ::= r0\n{DOUBLING}\nr300 ::= "a" | "b"?',
        f"root ::= {'(' * 60}[a-z] root{')?' * 60}",
        f"root ::= {'(' * 60}[a-z] {') root' * 60}| [0-9]",
        "root ::= (((.{1,9999}){1,9999}){1,9999})",
        "root ::= " + '"a"? ' * 3000,
        "root ::= " + "[a-z]* root? " * 1000,
        "root ::= w\nw ::= [ab]* [a] " + "[ab] " * 200 + "| [c] root",
        "root ::= " + " | ".join(f"[{chr(0x4E00 + n)}-{chr(0x9000 + n)}] root?" for n in range(900)),
    ],
)
def test_grammars_that_are_too_much_are_refused_in_one_line(gbnf: str) -> None:
    wrong = what_is_wrong(StructuredOutputsParams(grammar=gbnf).to_grammar())
    assert wrong is None or ("\n" not in wrong and "lex" not in wrong), wrong


@pytest.mark.parametrize(("gbnf", "begun"), [(JSON, '{"a":"'), (C, "int f(){/*"), (LIST, "- "), (ENGLISH, "a")])
def test_a_mask_within_long_words_does_not_parse_each_character(gbnf: str, begun: str) -> None:
    """Which would take two hundred times as long: of each of the tokens here, an item of the parser and more."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=6)) for _ in range(3000)]
    vocabulary = Vocabulary(range(256), words)
    grammar = StructuredOutputsParams(grammar=gbnf).to_grammar()
    limits = LLParserLimits(step_max_items=1000, verbose_errors=False)
    matcher = LLMatcher(vocabulary.seen, grammar, log_level=0, limits=limits)
    matcher.consume_tokens(vocabulary(begun))
    assert len(allowed(matcher)) > 3000
