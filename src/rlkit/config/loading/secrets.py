"""Detect and redact literal credentials in a configuration.

Invariant: messages name the field of a credential, never the credential itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from rlkit._util.redaction import SHORTEST_SECRET_CHARS, is_secret_name
from rlkit._util.redaction import redact as redact_variables
from rlkit.config.loading.nodes import KeyPath, Node, dotted, from_python, leaves, walk
from rlkit.errors import ConfigError
from rlkit.types import Json

REDACTED = "[redacted]"

CREDENTIAL_SHAPES = re.compile(
    r"""
      (?<![A-Za-z0-9]) (?:
          tml-[A-Za-z0-9_\-]{8,}                      # Tinker
        | sk-[A-Za-z0-9_\-]{16,}                      # OpenAI, Anthropic and others
        | hf_[A-Za-z0-9]{16,}                         # Hugging Face
        | (?:AKIA|ASIA)[A-Z0-9]{16}                   # AWS
        | gh[pousr]_[A-Za-z0-9]{20,}                  # GitHub
        | github_pat_[A-Za-z0-9_]{20,}
        | glpat-[A-Za-z0-9_\-]{16,}                   # GitLab
        | xox[abeoprs]-[A-Za-z0-9\-]{10,}             # Slack
        | AIza[A-Za-z0-9_\-]{30,}                     # Google
      )
      # JSON web token. To avoid quadratic time, a match starts only where a run of letters, digits, _ and - starts;
      # characters of the run before the token are redacted, too.
      | (?<![A-Za-z0-9_\-]) (?=[A-Za-z0-9_\-]++\.[A-Za-z0-9_\-]{8,}+\.)
        [A-Za-z0-9_\-]*? (?<![A-Za-z0-9]) eyJ[A-Za-z0-9_\-]{8,}+\.[A-Za-z0-9_\-]{8,}+\.[A-Za-z0-9_\-]*+
      | (?<=://) [^\s/:@]+ : [^\s/@]+ (?=@)           # the user and password of a URL
      | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    """,
    re.VERBOSE,
)

ALWAYS_SECRET = frozenset({"secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"})
"""Words in the name of a field: a long literal is then a secret, and a short literal if it mixes letters and digits."""

OFTEN_SECRET = frozenset({"key", "token"})
"""Words in the name of a field (`token`, not `tokens`): a long literal is then a secret if it looks random."""

PASSWORD_LITERAL = re.compile(r"[^\s<>{}$]{16,}|(?=.*[0-9])(?=.*[A-Za-z])[^\s<>{}$]{8,}")
RANDOM_LITERAL = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_\-+/=.~]{16,}")
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_CREDENTIAL_QUALIFIERS = frozenset(
    {"access", "account", "admin", "api", "auth", "bearer", "bot", "client", "encryption", "hf", "license", "openai"}
    | {"anthropic", "personal", "private", "refresh", "secret", "service", "session", "signing", "tinker", "wandb"}
)

REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::-([^}]*))?\}")  # ${NAME} or ${NAME:-default}; group 1: default


def redact(text: str, *, hidden: Iterable[str] = ()) -> str:
    """Replace the `hidden` texts, and texts with the shape of a well-known credential, by `[redacted]`."""
    for secret in sorted(hidden, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return CREDENTIAL_SHAPES.sub(REDACTED, text)


def clean(text: str) -> str:
    """Return `text` without well-known credentials and without values of secret environment variables."""
    return redact_variables(redact(text))


def is_secret(key: str, text: str) -> bool:
    """Return whether `text` under `key` is a literal credential, rather than a reference to an environment variable."""
    literal = REFERENCE.sub(lambda reference: reference[1] or "", text)
    if CREDENTIAL_SHAPES.search(literal):
        return True
    words = {word.lower() for word in WORDS.findall(key)}
    if words & ALWAYS_SECRET:
        return PASSWORD_LITERAL.fullmatch(literal) is not None
    return bool(words & OFTEN_SECRET) and RANDOM_LITERAL.fullmatch(literal) is not None


def refuse_secrets(root: Node) -> None:
    """Raise ConfigError if a configuration, before interpolation, contains a credential."""
    for keys, node in walk(root):
        if keys and is_secret("", str(keys[-1])):
            raise ConfigError(f"{node.origin}: a key under {dotted(keys[:-1]) or 'the top'} looks like a secret")
        if isinstance(node.value, str) and is_secret(key_of(keys), node.value):
            fix = "write ${NAME} instead and set NAME in the environment or in .env"
            raise ConfigError(f"{node.origin}: {dotted(keys)} contains a secret: {fix}")


def secret_warnings(args: Mapping[str, Json], *, field: str) -> list[str]:
    """Return a warning for each argument of an environment that is a literal secret, judged by its name.

    Texts with the shape of a credential are rejected earlier, but a password can be any word.

    Args:
        args: arguments before interpolation.
        field: dotted path of `args`.
    """
    return [
        f"{'.'.join([field, *map(str, keys)])} looks like a literal secret, and is recorded with the run: "
        "write ${NAME} instead, and set NAME in the environment or in .env"
        for keys, key, text in _texts(args)
        if _may_be_secret(key, text)
    ]


def _may_be_secret(key: str, text: str) -> bool:
    """Return whether `text` is probably a secret, judged by the last word of `key`; broader than `is_secret`."""
    literal = REFERENCE.sub(lambda reference: reference[1] or "", text)
    if is_secret("", literal):
        return True
    words = [word.lower() for word in WORDS.findall(key) if not word.isdigit()]
    last = words[-1] if words else ""
    if last.removesuffix("s") in OFTEN_SECRET:  # `api_key` is a secret field, but not `answer_key`
        is_secret_key = bool(_CREDENTIAL_QUALIFIERS.intersection(words[:-1]))
    else:
        # `is_secret_name` also matches words that only contain `key` or `token`, such as `tokenizer` and `monkey`.
        is_secret_key = last in ALWAYS_SECRET or ("key" not in last and "token" not in last and is_secret_name(last))
    return is_secret_key and len(literal) >= SHORTEST_SECRET_CHARS and not any(map(str.isspace, literal))


def refuse_redacted(root: Node) -> None:
    """Raise ConfigError for a `[redacted]` value, which is not a usable credential."""
    for keys, node in leaves(root):
        if node.value == REDACTED:
            fix = "set it to ${NAME}, with NAME in the environment or in .env"
            raise ConfigError(f"{node.origin}: {dotted(keys)} was a secret and is not recorded: {fix}")


def key_of(keys: KeyPath) -> str:
    """Return the last key of a mapping in a key path; the items of a list share it."""
    return next((key for key in reversed(keys) if isinstance(key, str)), "")


def secrets_in(value: Json) -> list[str]:
    """Return every credential in a JSON value."""
    return [text for _, key, text in _texts(value) if is_secret(key, text)]


def _texts(value: Json) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield key path, key and text of every string."""
    for keys, node in leaves(from_python(value)):
        if isinstance(node.value, str):
            yield keys, key_of(keys), node.value
