"""Differences between a task of terminal-bench 1 and what it is as a task of Harbor.

Invariant: a setting of a task is carried over, has no effect on rewards, or is named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml

from rlkit.types import Json

PYTEST = "pytest"
"""The parser whose rule the converted tests follow."""

# A command of these keeps a container alive, and does nothing else.
_IDLE_WORDS = set("sh bash /bin/sh /bin/bash -c sleep infinity inf tail -f /dev/null exec".split())  # noqa: SIM905


def differences(task: Path) -> list[str]:
    """List what cannot be converted exactly, a line each, of a task in a folder that has a readable `task.yaml`."""
    return [*_of_settings(task), *_of_compose(task / "docker-compose.yaml")]


def parser_of(task: Path) -> str:
    """Return the name of the parser that reads the output of a task's tests."""
    return str(_read_yaml(task / "task.yaml").get("parser_name") or PYTEST)


def _of_settings(task: Path) -> Iterator[str]:
    if (parser := parser_of(task)) != PYTEST:
        yield f"its tests were read by the parser {parser}; here their exit code decides"
    if _read_yaml(task / "task.yaml").get("run_tests_in_same_shell"):
        yield "its tests ran in the agent's shell; here they run in a shell of their own, without its variables"
    if (task / "solution.yaml").exists():
        yield "its solution is keystrokes (solution.yaml), which cannot be replayed: `rlkit tasks check` has none"


def _of_compose(path: Path) -> Iterator[str]:
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
        what = f"services ({others}) of docker-compose.yaml" if others else "docker-compose.yaml"
        yield f"its {what} need{'' if others else 's'} a container engine: set environment to docker; local refuses it"
    elif "entrypoint" in service:
        yield "its entrypoint needs a container engine: set environment to docker; local refuses it"
    volumes = [str(volume) for volume in _sequence(service.get("volumes"))]
    if own := sorted(set(volumes) - processor.TBENCH_DEFAULT_VOLUMES):
        yield f"its volumes ({', '.join(own)}) are not mounted"
    yield from _of_command(service.get("command"))


def _of_command(command: Json) -> Iterator[str]:
    words = (command if isinstance(command, str) else " ".join(map(str, _sequence(command)))).split()
    if set(words) - _IDLE_WORDS:
        yield f"its container ran `{' '.join(words)}`; here nothing is started before the agent"


def _read_yaml(path: Path) -> Mapping[str, Json]:
    return as_mapping(yaml.safe_load(path.read_text(encoding="utf-8")))


def as_mapping(value: object) -> Mapping[str, Json]:
    """Return a mapping that was read from YAML; an empty one for anything else."""
    return cast("Mapping[str, Json]", value) if isinstance(value, Mapping) else {}


def _sequence(value: Json) -> Sequence[Json]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
