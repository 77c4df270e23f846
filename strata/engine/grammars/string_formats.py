"""What a string of a JSON schema's `format` is, as patterns; a format that is not here asserts nothing.

That is how JSON Schema 2020-12 has it: `format` is an annotation. llguidance refuses the ones that it does not know,
and takes 2023-02-29 for a date.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.engine.grammars.schema_parts import with_schemas_changed

# RFC 3339, with the days that a month has; a leap second is the last of a day of UTC.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = f"(?:{_MINUTE}:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-]{_MINUTE})|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"

# RFC 3339, appendix A: units without gaps, or weeks.
_TIME_UNITS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DATE_UNITS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DATE_UNITS}(?:{_TIME_UNITS})?|{_TIME_UNITS}|[0-9]+W)"

# RFC 2673 (dotted quad) and RFC 4291, as the grammar of RFC 3986 writes it out.
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"
_BEFORE_LAST = "|".join(
    [
        f"(?:{_GROUP}:){{6}}",
        f"::(?:{_GROUP}:){{5}}",
        *(f"(?:(?:{_GROUP}:){{0,{4 - n}}}{_GROUP})?::(?:{_GROUP}:){{{n}}}" for n in range(4, -1, -1)),
    ]
)
_IPV6 = (
    f"(?:(?:{_BEFORE_LAST})(?:{_GROUP}:{_GROUP}|{_IPV4})"
    f"|(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}|(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::)"
)

# RFC 1123, section 2.1.
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"

# RFC 5321, section 4.1.2, without the quoted local parts that it advises against.
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOSTNAME}|\[{_IPV4}\]|\[IPv6:{_IPV6}\])"

# RFC 3986.
_PERCENT = "%[0-9a-fA-F]{2}"
_NAME = f"(?:[!$&-.0-9;=A-Z_a-z~]|{_PERCENT})*"  # of unreserved characters and sub-delims
_USER = f"(?:[!$&-.0-;=A-Z_a-z~]|{_PERCENT})*"  # and colons
_SEGMENT = f"(?:[!$&-.0-;=@-Z_a-z~]|{_PERCENT})"  # and at signs
_TAIL = f"(?:[!$&-;=?-Z_a-z~]|{_PERCENT})*"  # and slashes and question marks
_HOST = rf"(?:\[(?:{_IPV6}|v[0-9a-fA-F]+\.[!$&-.0-;=A-Z_a-z~]+)\]|{_NAME})"
_AUTHORITY = f"(?:{_USER}@)?{_HOST}(?::[0-9]*)?"
_REST = f"{_SEGMENT}+(?:/{_SEGMENT}*)*"
_PATH = f"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_REST})?|(?:{_REST})?)"
_URI = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{_PATH}(?:\?{_TAIL})?(?:#{_TAIL})?"

# RFC 4122.
_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

# What a whole string follows, all of it.
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}[tT]{_TIME}",),
    "duration": (_DURATION,),
    "email": (_EMAIL, "[^@]{1,64}@.*", ".{1,254}"),
    "hostname": (_HOSTNAME, ".{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "uri": (_URI,),
    "uuid": (_UUID,),
}


def with_formats_as_patterns(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with each known `format` as patterns, beside the one that may be there, and without the others."""
    made = with_schemas_changed(schema, with_formats_as_patterns)
    if isinstance(made.get("format"), str):
        patterns = [{"pattern": f"^(?:{pattern})$"} for pattern in PATTERNS.get(made.pop("format"), ())]
        others = made.get("allOf", [])
        if patterns and isinstance(others, list):
            made["allOf"] = [*others, *patterns]
    return made
