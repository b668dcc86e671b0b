"""Secrets that an environment asks for, by the names of the variables that hold them.

Invariant: a task knows names only. A value is read when a session is opened, goes to the server, and is taken out of
everything that comes back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlkit._util.redaction import REDACTED, SHORTEST_SECRET_CHARS
from rlkit.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Secret:
    """A secret.

    Args:
        env: the variable that holds it.
        domains: hosts that a hosted environment may send it to; without any, those that OpenReward knows for its name.
    """

    env: str
    domains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Secrets:
    """What one environment is given, by the names that it knows."""

    by_name: tuple[tuple[str, Secret], ...] = ()

    def sent(self) -> dict[str, str | tuple[str, list[str]]]:
        """Return them as the SDK takes them; UsageError if a variable is not set."""
        from openreward.api.sandboxes.secrets import WELL_KNOWN_SECRETS

        return {
            name: value if name in WELL_KNOWN_SECRETS and not secret.domains else (value, list(secret.domains))
            for name, secret in self.by_name
            for value in [_value(name, secret)]
        }

    def cleaner(self, key: str | None = None) -> Callable[[str], str]:
        """What takes their values out of a text, and the platform's key, where the server is given that."""
        values = {os.environ.get(secret.env, "") for _, secret in self.by_name} | {key or ""}
        hidden = sorted((value for value in values if len(value) >= SHORTEST_SECRET_CHARS), key=len, reverse=True)

        def clean(text: str) -> str:
            for value in hidden:
                text = text.replace(value, REDACTED)
            return text

        return clean


def secrets_of(given: Mapping[str, str | Mapping[str, str | Sequence[str]]], *, hosted: bool) -> Secrets:
    """Return the secrets that a configuration names, as the argument `secrets` of `openreward` has them.

    Raises:
        UsageError: a variable is misnamed or not set, or the platform that hosts the environment needs domains.
    """
    found = Secrets(tuple((name, _secret(name, value)) for name, value in given.items()))
    for name, secret in found.by_name:
        _value(name, secret)
    if hosted:
        from openreward.api.sandboxes.secrets import WELL_KNOWN_SECRETS

        for name, secret in found.by_name:
            if name not in WELL_KNOWN_SECRETS and not secret.domains:
                raise UsageError(
                    f"secrets.{name}: OpenReward does not know where it may be sent: write "
                    f"{{env: {secret.env}, domains: [api.example.com]}}"
                )
    return found


def _secret(name: str, given: str | Mapping[str, str | Sequence[str]]) -> Secret:
    wanted = "give the name of the environment variable that holds it, such as OPENAI_API_KEY, and not its value"
    if isinstance(given, str):
        variable, domains = given, ()
    else:
        unknown = [key for key in given if key not in ("env", "domains")]
        named, listed = given.get("env"), given.get("domains", ())
        if unknown or not isinstance(named, str) or isinstance(listed, str):
            raise UsageError(f"secrets.{name}: give {{env: NAME, domains: [host, …]}}")
        variable, domains = named, tuple(listed)
    if not _NAME.fullmatch(variable):
        raise UsageError(f"secrets.{name}: {wanted}")
    return Secret(variable, domains)


def _value(name: str, secret: Secret) -> str:
    value = os.environ.get(secret.env)
    if not value:
        shown = secret.env if len(secret.env) <= 40 else "that variable"
        raise UsageError(f"secrets.{name}: {shown} is not set; set it in the environment or in .env")
    return value
