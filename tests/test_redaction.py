from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.redaction import redact

SECRETS = st.text(min_size=6, max_size=60).filter(
    lambda text: text.strip() and "\0" not in text and "/" not in text[:1]
)


@given(st.binary(max_size=9), SECRETS, st.binary(max_size=9), st.booleans())
def test_no_secret_is_in_what_was_encoded_with_it(before: bytes, secret: str, after: bytes, urlsafe: bool) -> None:
    raw = secret.encode(errors="surrogateescape")
    encode = base64.urlsafe_b64encode if urlsafe else base64.b64encode
    whole = encode(before + raw + after).decode()
    told = redact(f"Authorization: Basic {whole}", {"MY_KEY": secret})
    assert "***" in told
    kept = told.removeprefix("Authorization: Basic ").split("***")
    assert sum(map(len, kept)) <= len(whole) - (len(raw) * 8 - 10) // 6


@pytest.mark.parametrize("write", [str, repr, json.dumps, quote, quote_plus, lambda text: urlencode({"key": text})])
def test_no_secret_is_in_a_text_that_a_program_has_made_of_it(write: object) -> None:
    assert callable(write)
    secret = 'can"ary+ü/\\ 7'
    told = redact(f"before {write(secret)} after", {"MY_KEY": secret})
    assert "can" not in told
    assert told.startswith("before ")
    assert told.endswith(" after")


def test_each_line_of_a_secret_of_several_is_one() -> None:
    secret = "-----BEGIN-----\nfirst-canary-line-of-it\n  second-canary-line-of-it\nshort\n"
    told = redact("  | first-canary-line-of-it\n  | second-canary-line-of-it\n  | short", {"MY_KEY": secret})
    assert told == "  | ***\n  | ***\n  | short"


def test_what_is_no_secret_stays() -> None:
    environ = {"MY_KEY": "true", "HOME": "canary-canary", "KEY_FILE": "/"}
    assert redact("true canary-canary /", environ) == "true canary-canary /"
