"""Secrets of an environment, by the names of their environment variables.

Invariant: a task contains only names. A value is read when a session is opened, sent to the server, and removed from
all responses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlkit._util.redaction import REDACTED, SHORTEST_SECRET_CHARS
from rlkit.errors import UsageError


@dataclass(frozen=True)
class Secret:
    """Secret in an environment variable."""

    env: str
    # Hosts to which a hosted environment may send it; by default OpenReward's list for well-known names.
    domains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Secrets:
    """Secrets of one environment by their names in the environment."""

    by_name: tuple[tuple[str, Secret], ...] = ()

    def sent(self) -> dict[str, str | tuple[str, list[str]]]:
        """Return the secrets in the SDK's form; UsageError if a variable is not set."""
        from openreward.api.sandboxes.secrets import WELL_KNOWN_SECRETS

        return {
            name: value if name in WELL_KNOWN_SECRETS and not secret.domains else (value, list(secret.domains))
            for name, secret in self.by_name
            for value in [_read_value(name, secret)]
        }

    def cleaner(self, key: str | None = None) -> Callable[[str], str]:
        """Return a function that removes the secrets' values, and the platform's key if given, from a text."""
        values = {os.environ.get(secret.env, "") for _, secret in self.by_name} | {key or ""}
        hidden = sorted((value for value in values if len(value) >= SHORTEST_SECRET_CHARS), key=len, reverse=True)

        def clean(text: str) -> str:
            for value in hidden:
                text = text.replace(value, REDACTED)
            return text

        return clean


def parse_secrets(secrets: Mapping[str, str | Mapping[str, str | Sequence[str]]], *, hosted: bool) -> Secrets:
    """Return the secrets of the argument `secrets` of `openreward`.

    Raises:
        UsageError: a variable is misnamed or not set, or the platform that hosts the environment needs domains.
    """
    parsed = Secrets(tuple((name, _parse_secret(name, value)) for name, value in secrets.items()))
    for name, secret in parsed.by_name:
        _read_value(name, secret)
    if hosted:
        from openreward.api.sandboxes.secrets import WELL_KNOWN_SECRETS

        for name, secret in parsed.by_name:
            if name not in WELL_KNOWN_SECRETS and not secret.domains:
                raise UsageError(
                    f"secrets.{name}: OpenReward has no allowed hosts for this name: write "
                    f"{{env: {secret.env}, domains: [api.example.com]}}"
                )
    return parsed


def _parse_secret(name: str, secret: str | Mapping[str, str | Sequence[str]]) -> Secret:
    hint = "give the name of an environment variable, such as OPENAI_API_KEY, not the value of the secret"
    if isinstance(secret, str):
        variable, domains = secret, ()
    else:
        unknown = [key for key in secret if key not in ("env", "domains")]
        env, hosts = secret.get("env"), secret.get("domains", ())
        if unknown or not isinstance(env, str) or isinstance(hosts, str):
            raise UsageError(f"secrets.{name}: give {{env: NAME, domains: [host, …]}}")
        variable, domains = env, tuple(hosts)
    if not (variable.isascii() and variable.isidentifier()):
        raise UsageError(f"secrets.{name}: {hint}")
    return Secret(variable, domains)


def _read_value(name: str, secret: Secret) -> str:
    value = os.environ.get(secret.env)
    if not value:
        variable = secret.env if len(secret.env) <= 40 else "that variable"
        raise UsageError(f"secrets.{name}: {variable} is not set; set it in the environment or in .env")
    return value
