from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.redaction import hide_credentials, is_malformed_url, show_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host/t.git", "https://host/t.git"),
        ("https://me:secret@host:8443/t.git?token=secret#secret", "https://host:8443/t.git"),
        ("https://me:sec@ret@[::1]:80", "https://[::1]:80"),
        ("ssh://git@host/a@b/t.git", "ssh://host/a@b/t.git"),
        ("https://me:sec/ret@host/t.git", "https://***"),
        ("https://me:sec?ret@host/t.git", "https://***"),
        ("https://mirror/https://me:secret@host/t.git", "https://mirror/https://host/t.git"),
        ("file:///srv/t.git", "file:///srv/t.git"),
        ("/srv/t.git", "/srv/t.git"),
        ("git@host:t.git", "git@host:t.git"),
    ],
)
def test_a_url_is_displayed_without_credentials(url: str, expected: str) -> None:
    assert show_url(url) == hide_credentials(url) == expected
    assert is_malformed_url(url) == expected.endswith("***")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "fatal: unable to access 'https://me:secret@host/t.git?token=se'cret/': Could not resolve host: host",
            "fatal: unable to access 'https://host/t.git': Could not resolve host: host",
        ),
        ("(http://me:secret@a?secret), http://b?secret.", "(http://a), http://b."),
        ("http://a,http://me:secret@b", "http://***"),
        ("no URL: a://", "no URL: a://"),
    ],
)
def test_urls_in_a_text_are_displayed_without_credentials(text: str, expected: str) -> None:
    assert hide_credentials(text) == expected


@given(st.text(st.characters(exclude_characters="/?#")))
def test_no_password_of_any_url_is_displayed(more: str) -> None:
    assert show_url(f"https://me:secret{more}@host/t.git") == "https://host/t.git"
