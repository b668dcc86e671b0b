"""Literal credentials in a configuration.

Invariant: no message repeats a credential; it only names the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlkit._util.redaction import is_secret_name
from rlkit.config.loading.nodes import Node, Steps, dotted, from_python, is_list, is_mapping, scalars
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from rlkit.types import Json

REDACTED = "[redacted]"

CREDENTIAL_SHAPES = re.compile(
    r"""
      (?<![A-Za-z0-9]) (?:
          tml-[A-Za-z0-9_\-]{8,}                      # Tinker
        | sk-[A-Za-z0-9_\-]{16,}                      # OpenAI, Anthropic and their like
        | hf_[A-Za-z0-9]{16,}                         # Hugging Face
        | (?:AKIA|ASIA)[A-Z0-9]{16}                   # AWS
        | gh[pousr]_[A-Za-z0-9]{20,}                  # GitHub
        | github_pat_[A-Za-z0-9_]{20,}
        | glpat-[A-Za-z0-9_\-]{16,}                   # GitLab
        | xox[abeoprs]-[A-Za-z0-9\-]{10,}             # Slack
        | AIza[A-Za-z0-9_\-]{30,}                     # Google
      )
      # JSON web token. Each run of its letters is looked at from its start alone, or a text of many beginnings of one
      # would take the square of its length; what stands before the token in its run goes with it.
      | (?<![A-Za-z0-9_\-]) (?=[A-Za-z0-9_\-]++\.[A-Za-z0-9_\-]{8,}+\.)
        [A-Za-z0-9_\-]*? (?<![A-Za-z0-9]) eyJ[A-Za-z0-9_\-]{8,}+\.[A-Za-z0-9_\-]{8,}+\.[A-Za-z0-9_\-]*+
      | (?<=://) [^\s/:@]+ : [^\s/@]+ (?=@)           # the user and password of a URL
      | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    """,
    re.VERBOSE,
)

ALWAYS_SECRET = frozenset({"secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"})
"""Words of a key under which a long literal is a secret, and a short one if it mixes letters and digits."""

OFTEN_SECRET = frozenset({"key", "token"})
"""Words of a key under which a long literal is a secret if it looks random. `max_tokens` has the word `tokens`."""

PASSWORD_LITERAL = re.compile(r"[^\s<>{}$]{16,}|(?=.*[0-9])(?=.*[A-Za-z])[^\s<>{}$]{8,}")
RANDOM_LITERAL = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_\-+/=.~]{16,}")
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
SHORTEST_SECRET_CHARS = 6
"""Minimum length of a secret; a shorter literal under such a key is a setting, such as `auth: basic`."""

_OFTEN_TEXT = frozenset({"key", "keys", "token", "tokens"})
"""Last words of keys of secrets only after a word of `_BEFORE_KEYS`: `api_key`, but not `answer_key`."""

_KEY_OR_TOKEN = re.compile("key|token")
_BEFORE_KEYS = frozenset(
    {"access", "account", "admin", "api", "auth", "bearer", "bot", "client", "encryption", "hf", "license", "openai"}
    | {"anthropic", "personal", "private", "refresh", "secret", "service", "session", "signing", "tinker", "wandb"}
)

REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::-([^}]*))?\}")


def redact(text: str, *, hidden: Iterable[str] = ()) -> str:
    """Replace these secrets, and anything with the shape of a well-known credential, by `[redacted]`."""
    for secret in sorted(hidden, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return CREDENTIAL_SHAPES.sub(REDACTED, text)


def is_secret(key: str, text: str) -> bool:
    """Return whether `text` under `key` is a credential; a reference to an environment variable is none."""
    literal = REFERENCE.sub(lambda reference: reference[1] or "", text)
    if CREDENTIAL_SHAPES.search(literal):
        return True
    words = {word.lower() for word in WORDS.findall(key)}
    if words & ALWAYS_SECRET:
        return PASSWORD_LITERAL.fullmatch(literal) is not None
    return bool(words & OFTEN_SECRET) and RANDOM_LITERAL.fullmatch(literal) is not None


def refuse_secrets(root: Node, steps: Steps = (), *, key: str = "") -> None:
    """Raise ConfigError if a configuration, before interpolation, contains a credential."""
    if is_mapping(root.value):
        for name, child in root.value.items():
            if is_secret("", name):
                raise ConfigError(f"{child.origin}: a key under {dotted(steps) or 'the top'} looks like a secret")
            refuse_secrets(child, (*steps, name), key=name)
    elif is_list(root.value):
        for index, child in enumerate(root.value):
            refuse_secrets(child, (*steps, index), key=key)
    elif isinstance(root.value, str) and is_secret(key, root.value):
        raise ConfigError(
            f"{root.origin}: {dotted(steps)} contains a secret: write ${{NAME}} instead and set NAME in the "
            "environment or in .env"
        )


def secret_warnings(args: Mapping[str, Json], *, field: str) -> list[str]:
    """Return a warning for each argument of an environment that is a literal secret by its name.

    Text with the shape of a credential was refused already; a password may be any word.

    Args:
        args: arguments before interpolation.
        field: dotted path of `args`.
    """
    warnings = list[str]()
    for steps, node in scalars(from_python(args)):
        key = next(step for step in reversed(steps) if isinstance(step, str))
        if isinstance(node.value, str) and _is_literal_secret(key, node.value):
            warnings.append(
                f"{'.'.join([field, *map(str, steps)])} looks like a secret that is written out, and is recorded with "
                "the run: write ${NAME} instead, and set NAME in the environment or in .env"
            )
    return warnings


def _is_literal_secret(key: str, text: str) -> bool:
    literal = REFERENCE.sub(lambda reference: reference[1] or "", text)
    if is_secret("", literal):
        return True
    words = [word.lower() for word in WORDS.findall(key) if not word.isdigit()]
    if words and words[-1] in _OFTEN_TEXT:
        is_secret_key = bool(_BEFORE_KEYS.intersection(words[:-1]))
    else:
        # `tokenizer` and `monkey` are no such words
        is_sure = bool(words) and not _KEY_OR_TOKEN.search(words[-1]) and is_secret_name(words[-1])
        is_secret_key = is_sure or bool(ALWAYS_SECRET.intersection(words[-1:]))
    return is_secret_key and len(literal) >= SHORTEST_SECRET_CHARS and not any(map(str.isspace, literal))


def refuse_redacted(root: Node) -> None:
    """Raise ConfigError for a `[redacted]` value, which would be a wrong password."""
    for steps, node in scalars(root):
        if node.value == REDACTED:
            raise ConfigError(
                f"{node.origin}: {dotted(steps)} was a secret and is not recorded: set it to ${{NAME}}, with "
                "NAME in the environment or in .env"
            )


def without_secrets(value: Json, *, key: str = "") -> Json:
    """Return a copy with every credential replaced by `[redacted]`."""
    if isinstance(value, str):
        return REDACTED if is_secret(key, value) else value
    if isinstance(value, dict):
        return {name: without_secrets(child, key=name) for name, child in value.items()}
    if isinstance(value, list):
        return [without_secrets(child, key=key) for child in value]
    return value


def secrets_in(value: Json, *, key: str = "") -> list[str]:
    """Return every credential in a JSON value."""
    if isinstance(value, str):
        return [value] if is_secret(key, value) else []
    if isinstance(value, Mapping):
        return [secret for name, child in value.items() for secret in secrets_in(child, key=name)]
    if isinstance(value, Sequence):
        return [secret for child in value for secret in secrets_in(child, key=key)]
    return []
