"""Entries of terminal-bench 1's registry.

Invariant: an entry has a repository, a commit or branch, and a folder below the repository's root. Git cannot interpret
any of them as an option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rlkit._util.sections import validate_fields
from rlkit.errors import UsageError, did_you_mean
from rlkit.types import Json

REGISTRY_URL = "https://raw.githubusercontent.com/laude-institute/terminal-bench/main/registry.json"
"""The published registry of terminal-bench 1."""

HEAD = "head"
"""Name of the newest commit of a branch, and of a version that tracks the branch."""

# fmt: off
_ON_A_BRANCH = (
    "aider-polyglot", "algotune", "appworld-dev", "appworld-test_challenge", "appworld-test_normal", "deveval",
    "evoeval-difficult", "mlebench-lite", "quixbugs", "swe-lancer-diamond", "swe-lancer-diamond-ic",
    "swe-lancer-diamond-manager", "swebench-verified", "sweperf", "swesmith", "usaco",
)
# fmt: on

PUBLISHED: Mapping[str, Sequence[str]] = {
    "terminal-bench-core": ("0.1.0", "0.1.1", HEAD),
    **dict.fromkeys(_ON_A_BRANCH, (HEAD,)),
}
"""Versions of each dataset in the published registry. Harbor's registry has other versions of some datasets."""


def _check_argument(value: str) -> str:
    if not value or value.startswith("-") or any(character.isspace() for character in value):
        raise ValueError("must not be empty, contain a space or begin with -, because it is an argument of git")
    return value


def _check_url(value: str) -> str:
    host = value.partition(":")[0]
    is_remote = "://" in value or (host != value and "/" not in host)
    if not is_remote and not value.startswith("/"):
        raise ValueError(f"{value!r} is a relative path: give a URL, or an absolute path")
    return value


def _check_commit(value: str) -> str:
    if value != HEAD and not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", value):
        raise ValueError(f"{value!r} is neither a full commit hash nor {HEAD!r}")
    return value


def _check_folder(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or any(character in value for character in "\n*?[\\!"):
        raise ValueError(f"{value!r} is not a folder below the repository's root")
    return str(path)


class Entry(BaseModel):
    """Version of a dataset, in the format of terminal-bench 1's registry."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")

    name: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(min_length=1)]  # a release such as `0.1.1`, or `head`
    # Git repository: a URL, `HOST:PATH` or an absolute path.
    github_url: Annotated[str, AfterValidator(_check_argument), AfterValidator(_check_url)]
    dataset_path: Annotated[str, AfterValidator(_check_folder)]
    branch: Annotated[str, AfterValidator(_check_argument)]
    # Full hash, or `head` for the newest commit of the branch.
    commit_hash: Annotated[str, AfterValidator(_check_commit)]
    task_id_subset: tuple[str, ...] | None = None  # names of the dataset's tasks; None for all tasks of the folder

    @property
    def label(self) -> str:
        """`name==version`, as in `tb run --dataset`."""
        return f"{self.name}=={self.version}"


def is_published(name: str, version: str | None) -> bool:
    """Return whether terminal-bench 1's published registry has a dataset.

    Without a version, return True only for names that Harbor's registry lacks.
    """
    return name == "terminal-bench-core" if version is None else version in PUBLISHED.get(name, ())


def find_entry(rows: Sequence[Mapping[str, Json]], name: str, version: str | None, *, registry: str) -> Entry:
    """Find the entry of a dataset in rows of terminal-bench 1's format.

    Args:
        version: version of the dataset; None for the newest release, or `head` if there are no releases.
        registry: file or URL of the rows, for error messages.

    Raises:
        UsageError: there is no such entry, or it lacks a field.
    """
    candidates = [row for row in rows if row["name"] == name]
    if not candidates:
        names = sorted({str(row["name"]) for row in rows})
        raise UsageError(
            f"dataset: {registry} has no {name!r}.{did_you_mean(name, names)} It has: {', '.join(names[:20])}"
        )
    versions = [str(row.get("version")) for row in candidates]
    version = version or max(versions, key=_parse_release)
    row = next((row for row in candidates if row.get("version") == version), None)
    if row is None:
        raise UsageError(f"dataset: {registry} has no version {version!r} of {name}; it has {', '.join(versions)}")
    return validate_fields(Entry, row, place=f"registry: {registry}: {name}[{version}]")


def _parse_release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; empty for other versions, which sort before all releases."""
    return tuple(map(int, version.split("."))) if re.fullmatch(r"\d+(\.\d+)*", version) else ()
