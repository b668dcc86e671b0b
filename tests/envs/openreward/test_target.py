from __future__ import annotations

import pytest

from rlkit.envs.openreward.connection.target import Target, parse_target
from rlkit.errors import UsageError


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("Owner/Name", Target("Owner/Name")),
        ("Owner/Name@2f9c1ab", Target("Owner/Name", version="2f9c1ab")),
        ("Owner/Name#Hard", Target("Owner/Name", variant="hard")),
        ("Owner/Name@1.2#hard", Target("Owner/Name", variant="hard", version="1.2")),
        ("Owner/Name#hard@1.2", Target("Owner/Name", variant="hard", version="1.2")),
        ("http://127.0.0.1:8080", Target("127.0.0.1:8080", "http://127.0.0.1:8080")),
        ("https://env.example.com/", Target("env.example.com", "https://env.example.com")),
        ("http://127.0.0.1:80#a@1", Target("127.0.0.1:80", "http://127.0.0.1:80", "a", "1")),
    ],
)
def test_one_string_names_a_hosted_environment_or_a_server(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text",
    ["", "Name", "Owner/Name/More", "Owner/Name#", "Owner/Name@1#a@2", "ftp://host", "http://", "http://host:port",
     "http://user:password@host", "http://host?key=1", "Owner/Name#a b"],
)  # fmt: skip
def test_any_other_target_is_rejected_without_showing_a_password(text: str) -> None:
    with pytest.raises(UsageError, match=r"^target: ") as refused:
        parse_target(text)
    assert "password@" not in str(refused.value)


def test_two_owners_of_one_name_and_two_variants_have_different_labels() -> None:
    texts = ["A/Name", "B/Name", "A/Name#one", "A/Name#two"]
    assert len({parse_target(text).label for text in texts}) == len(texts)
