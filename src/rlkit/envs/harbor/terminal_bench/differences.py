"""Differences between a terminal-bench 1 task and its conversion to a Harbor task.

Invariant: each setting of a task is converted, has no effect on rewards, or is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlkit._util.files.json_fields import pick, pick_list, pick_object
from rlkit.types import Json

PYTEST = "pytest"
"""Name of the only parser whose rule for rewards is converted."""

# A command that consists of these words only keeps a container running.
_IDLE_WORDS = set("sh bash /bin/sh /bin/bash -c sleep infinity inf tail -f /dev/null exec".split())  # noqa: SIM905


def list_differences(task: Path, settings: Mapping[str, Json], compose: Mapping[str, Json]) -> list[str]:
    """List the differences of a task and its conversion, one line each.

    Args:
        settings: content of `task.yaml`.
        compose: content of `docker-compose.yaml`.
    """
    return [*_compare_settings(task, settings), *_compare_compose_file(task.name, compose)]


def get_parser_name(settings: Mapping[str, Json]) -> str:
    """Return the name of the parser that reads the output of a task's tests."""
    return str(settings.get("parser_name") or PYTEST)


def _compare_settings(task: Path, settings: Mapping[str, Json]) -> Iterator[str]:
    if (parser := get_parser_name(settings)) != PYTEST:
        yield f"the parser {parser} determined the result of its tests; here their exit code does"
    if settings.get("run_tests_in_same_shell"):
        yield "its tests ran in the agent's shell; here they run in a separate shell, without its variables"
    if (task / "solution.yaml").exists():
        yield "its solution (solution.yaml) is keystrokes, which cannot be replayed: `rlkit tasks check` finds none"


def _compare_compose_file(task_name: str, compose: Mapping[str, Json]) -> Iterator[str]:
    from harbor.mappers.terminal_bench import DockerComposeProcessor

    services = pick_object(compose, "services")
    if not services:
        return
    processor = DockerComposeProcessor(task_name)
    main, _ = processor.get_main_service(dict(compose))
    service = pick_object(services[main], "")
    if not processor.can_collapse_to_dockerfile(dict(compose)):
        others = ", ".join(name for name in services if name != main)
        subject = f"services ({others}) of docker-compose.yaml need" if others else "docker-compose.yaml needs"
        yield f"its {subject} a container engine: set environment to docker; local does not support it"
    elif "entrypoint" in service:
        yield "its entrypoint needs a container engine: set environment to docker; local does not support it"
    volumes = {str(volume) for volume in pick_list(service, "volumes")}
    if unmounted := sorted(volumes - processor.TBENCH_DEFAULT_VOLUMES):
        yield f"its volumes ({', '.join(unmounted)}) are not mounted"
    command = pick(service, "command", str) or " ".join(map(str, pick_list(service, "command")))
    words = command.split()
    if set(words) - _IDLE_WORDS:
        yield f"its container ran `{' '.join(words)}`; here nothing runs before the agent"
