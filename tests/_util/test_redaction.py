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
def test_no_secret_survives_in_an_encoded_text(before: bytes, secret: str, after: bytes, urlsafe: bool) -> None:
    raw = secret.encode(errors="surrogateescape")
    encode = base64.urlsafe_b64encode if urlsafe else base64.b64encode
    whole = encode(before + raw + after).decode()
    redacted = redact(f"Authorization: Basic {whole}", {"MY_KEY": secret})
    assert "***" in redacted
    plain_parts = redacted.removeprefix("Authorization: Basic ").split("***")
    assert sum(map(len, plain_parts)) <= len(whole) - (len(raw) * 8 - 10) // 6


@pytest.mark.parametrize("before", ["", "abc", "user:1"])
@pytest.mark.parametrize("secret", ["canary", "canary-99", "canary-99-xy"])
def test_a_secret_aligned_with_base64_groups_is_replaced_completely(before: str, secret: str) -> None:
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
def test_no_secret_survives_in_a_formatted_text(write: object) -> None:
    assert callable(write)
    secret = 'can"ary+ü/\\ 7'
    redacted = redact(f"before {write(secret)} after", {"MY_KEY": secret})
    assert "can" not in redacted
    assert redacted.removeprefix("before ").removesuffix(" after").strip("'\"").removeprefix("key=") == "***"


@pytest.mark.parametrize("names", ["AB", "BA"])
def test_a_secret_inside_another_leaves_no_remainder(names: str) -> None:
    short, long = "swordfish", "the-swordfish-in-the-well"
    environ = {f"{names[0]}_KEY": short, f"{names[1]}_KEY": long}
    assert redact(f"{long} {short} {quote(long)}", environ) == "*** *** ***"
    environ = {f"{names[0]}_KEY": short, f"{names[1]}_KEY": f"{short}-in-the-well"}
    assert redact(f"{short}-in-the-well", environ) == "***"


def test_each_line_of_a_multi_line_secret_is_redacted() -> None:
    secret = "-----BEGIN-----\nfirst-canary-line-of-it\n  second-canary-line-of-it\nshort\n"
    redacted = redact("  | first-canary-line-of-it\n  | second-canary-line-of-it\n  | short", {"MY_KEY": secret})
    assert redacted == "  | ***\n  | ***\n  | short"


def test_text_without_a_secret_is_unchanged() -> None:
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
def test_the_value_of_a_variable_with_a_secret_name_is_redacted(name: str) -> None:
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
def test_the_value_of_a_variable_with_a_similar_name_is_unchanged(name: str) -> None:
    assert redact("it says canary-canary.", {name: "canary-canary"}) == "it says canary-canary."


@pytest.mark.parametrize("order", [1, -1])
def test_a_secret_that_begins_another_does_not_leave_its_tail(order: int) -> None:
    environ = {"A_KEY": "canary", "B_KEY": "canary-canary", "C_KEY": "canary-canary-tail"}
    ordered_environ = dict(list(environ.items())[::order])
    assert redact("canary-canary-tail canary-canary canary", ordered_environ) == "*** *** ***"
    encoded = base64.b64encode(b"canary-canary-tail").decode().rstrip("=")
    redacted = redact(encoded, ordered_environ)
    assert "***" in redacted
    assert len(redacted.replace("***", "")) <= 2
