from __future__ import annotations

import base64
import json
from pathlib import Path
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.redaction import redact

SECRETS = st.text(min_size=6, max_size=60).filter(
    lambda text: text.strip() and "\0" not in text and not Path(text).exists()  # a path that exists is no secret
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


@pytest.mark.parametrize("before", ["", "abc", "user:1"])
@pytest.mark.parametrize("secret", ["canary", "canary-99", "canary-99-xy"])
def test_where_the_groups_of_base64_are_those_of_the_secret_all_of_it_is_replaced(before: str, secret: str) -> None:
    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    assert redact(encoded(f"{before}{secret}end"), {"MY_KEY": secret}) == f"{encoded(before)}***{encoded('end')}"


@pytest.mark.parametrize(
    "write",
    [
        str,
        repr,
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        quote,
        lambda text: quote(text, safe=""),
        quote_plus,
        lambda text: urlencode({"key": text}),
    ],
)
def test_no_secret_is_in_a_text_that_a_program_has_made_of_it(write: object) -> None:
    assert callable(write)
    secret = 'can"ary+ü/\\ 7'
    told = redact(f"before {write(secret)} after", {"MY_KEY": secret})
    assert "can" not in told
    assert told.removeprefix("before ").removesuffix(" after").strip("'\"").removeprefix("key=") == "***"


@pytest.mark.parametrize("names", ["AB", "BA"])
def test_a_secret_that_is_a_part_of_another_leaves_nothing_of_it(names: str) -> None:
    short, long = "swordfish", "the-swordfish-in-the-well"
    environ = {f"{names[0]}_KEY": short, f"{names[1]}_KEY": long}
    assert redact(f"{long} {short} {quote(long)}", environ) == "*** *** ***"
    environ = {f"{names[0]}_KEY": short, f"{names[1]}_KEY": f"{short}-in-the-well"}
    assert redact(f"{short}-in-the-well", environ) == "***"


def test_each_line_of_a_secret_of_several_is_one() -> None:
    secret = "-----BEGIN-----\nfirst-canary-line-of-it\n  second-canary-line-of-it\nshort\n"
    told = redact("  | first-canary-line-of-it\n  | second-canary-line-of-it\n  | short", {"MY_KEY": secret})
    assert told == "  | ***\n  | ***\n  | short"


def test_what_is_no_secret_stays() -> None:
    environ = {"MY_KEY": "true", "HOME": "canary-canary", "KEY_FILE": "/"}
    assert redact("true canary-canary /", environ) == "true canary-canary /"


@pytest.mark.parametrize(
    "name",
    [
        "MY_KEY",
        "APIKEY",
        "HF_TOKEN",
        "CLIENT_SECRET",
        "DB_PASSWORD",
        "PGPASSWORD",
        "PASS",
        "DB_PASS",
        "DB_PASS_PROD",
        "PASS_GMAIL",
        "SSHPASS",
        "SMTP_PASS_2",
        "dbPass",
        "db_pass",
        "MYSQL_PASSWD",
        "GPG_PASSPHRASE",
        "CRED",
        "CREDS",
        "GIT_CREDENTIALS",
        "AWS_CREDENTIAL_BLOB",
        "gcpCreds",
        "AUTH",
        "NPM_AUTH",
        "REDISCLI_AUTH",
        "OAUTH_STATE",
        "PROXY_AUTHORIZATION",
        "httpAuth",
        "AUTH_URL",
        "PRIVATE",
        "SSH_PRIVATE",
        "PRIVATE_PEM",
        "signingPrivate",
        "DSN",
        "SENTRY_DSN",
        "SENTRYDSN",
        "DSN_REPLICA",
    ],
)
def test_the_value_of_a_variable_with_a_secrets_name_is_hidden(name: str) -> None:
    assert redact("it says canary-canary.", {name: "canary-canary"}) == "it says ***."


@pytest.mark.parametrize(
    "name",
    [
        "HOME",
        "PASSES",
        "PASS_RATE",
        "PASS_AT_K",
        "FIRST_PASSES",
        "COMPASS",
        "BYPASS",
        "bypassCache",
        "GO_COMPASS",
        "PASSENGER",
        "PASSIVE",
        "AUTHOR",
        "GIT_AUTHOR_NAME",
        "GIT_AUTHOR_EMAIL",
        "AUTHORITY",
        "SOUTH",
        "AUTH_METHOD",
        "AUTH_TYPE",
        "SSH_AUTH_SOCK",
        "CREDIT",
        "SACRED",
        "ACCREDITED",
        "PRIVATELY",
        "DEPRIVATION",
        "WORDSNAKE",
    ],
)
def test_the_value_of_a_variable_with_a_word_that_looks_alike_stays(name: str) -> None:
    assert redact("it says canary-canary.", {name: "canary-canary"}) == "it says canary-canary."


@pytest.mark.parametrize("order", [1, -1])
def test_a_secret_that_begins_another_does_not_leave_its_tail(order: int) -> None:
    environ = {"A_KEY": "canary", "B_KEY": "canary-canary", "C_KEY": "canary-canary-tail"}
    given = dict(list(environ.items())[::order])
    assert redact("canary-canary-tail canary-canary canary", given) == "*** *** ***"
    encoded = base64.b64encode(b"canary-canary-tail").decode().rstrip("=")
    told = redact(encoded, given)
    assert "***" in told
    assert len(told.replace("***", "")) <= 2
