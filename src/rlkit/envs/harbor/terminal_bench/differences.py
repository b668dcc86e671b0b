"""Differences between a terminal-bench 1 task and its conversion to a Harbor task.

Invariant: each setting of a task is converted, has no effect on rewards, or is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml

from rlkit.types import Json

PYTEST = "pytest"
"""Name of the only parser whose rule for rewards is converted."""

# A command that consists of these words only keeps a container running.
_IDLE_WORDS = set("sh bash /bin/sh /bin/bash -c sleep infinity inf tail -f /dev/null exec".split())  # noqa: SIM905


def list_differences(task: Path) -> list[str]:
    """List the differences of a task and its conversion, one line each; `task.yaml` must be readable."""
    return [*_compare_settings(task), *_compare_compose_file(task / "docker-compose.yaml")]


def read_parser_name(task: Path) -> str:
    """Return the name of the parser that reads the output of a task's tests."""
    return str(_read_yaml(task / "task.yaml").get("parser_name") or PYTEST)


def _compare_settings(task: Path) -> Iterator[str]:
    if (parser := read_parser_name(task)) != PYTEST:
        yield f"the parser {parser} determined the result of its tests; here their exit code does"
    if _read_yaml(task / "task.yaml").get("run_tests_in_same_shell"):
        yield "its tests ran in the agent's shell; here they run in a separate shell, without its variables"
    if (task / "solution.yaml").exists():
        yield "its solution (solution.yaml) is keystrokes, which cannot be replayed: `rlkit tasks check` finds none"


def _compare_compose_file(path: Path) -> Iterator[str]:
    from harbor.mappers.terminal_bench import DockerComposeProcessor

    compose = _read_yaml(path)
    services = as_mapping(compose.get("services"))
    if not services:
        return
    processor = DockerComposeProcessor(path.parent.name)
    main, _ = processor.get_main_service(dict(compose))
    service = as_mapping(services[main])
    if not processor.can_collapse_to_dockerfile(dict(compose)):
        others = ", ".join(name for name in services if name != main)
        subject = f"services ({others}) of docker-compose.yaml need" if others else "docker-compose.yaml needs"
        yield f"its {subject} a container engine: set environment to docker; local does not support it"
    elif "entrypoint" in service:
        yield "its entrypoint needs a container engine: set environment to docker; local does not support it"
    volumes = {str(volume) for volume in _as_sequence(service.get("volumes"))}
    if unmounted := sorted(volumes - processor.TBENCH_DEFAULT_VOLUMES):
        yield f"its volumes ({', '.join(unmounted)}) are not mounted"
    yield from _compare_command(service.get("command"))


def _compare_command(command: Json) -> Iterator[str]:
    words = (command if isinstance(command, str) else " ".join(map(str, _as_sequence(command)))).split()
    if set(words) - _IDLE_WORDS:
        yield f"its container ran `{' '.join(words)}`; here nothing runs before the agent"


def _read_yaml(path: Path) -> Mapping[str, Json]:
    return as_mapping(yaml.safe_load(path.read_text(encoding="utf-8")))


def as_mapping(value: object) -> Mapping[str, Json]:
    """Return a mapping from YAML unchanged, and an empty mapping for any other value."""
    return cast("Mapping[str, Json]", value) if isinstance(value, Mapping) else {}


def _as_sequence(value: Json) -> Sequence[Json]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
