"""Convert configurations of OpenReward's cookbook (`training/tinker`).

Invariant: every field of the old configuration is converted, or a note explains why not. Values of secrets are not
copied, only the names of their variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import cast

from rlkit._util.model_names import DEFAULT_MODEL
from rlkit.config.loading.load import load_config
from rlkit.config.loading.nodes import plain
from rlkit.config.loading.yaml_text import read_file
from rlkit.envs.openreward.connection.target import parse_target
from rlkit.errors import UsageError, did_you_mean
from rlkit.types import Json

type Section = dict[str, Json]

_ADVANTAGES = {"centered": "group_mean", "centered_normalized": "grpo"}
_LOSS_FIELDS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high", "beta": "beta"}

_MOVED: Mapping[str, tuple[str, ...]] = {
    "model_name": ("model",),
    "lora_rank": ("lora", "rank"),
    "resume_from": ("load_checkpoint",),
    "max_response_tokens": ("sampling", "max_tokens"),
    "batch_size": ("batch", "groups"),
    "learning_rate": ("optimizer", "learning_rate"),
    "weight_decay": ("optimizer", "weight_decay"),
    "save_every": ("checkpoint", "every"),
    "rollout_timeout": ("rollouts", "timeout_s"),
    "num_epochs": ("epochs",),
    "seed": ("seed",),
    "wandb_project_name": ("track", "wandb", "project"),
    "wandb_run_name": ("track", "wandb", "name"),
}
"""Fields with an equivalent in rlkit."""

_DEFAULTS: Mapping[str, Json] = {
    "max_response_tokens": 4096,
    "learning_rate": 4e-5,
    "rollout_timeout": 300,
    "save_every": 10,
    "seed": 42,
}
"""Defaults of the cookbook that differ from rlkit's."""

_LEFT: Mapping[str, str] = {
    "log_path": "runs are in RLKIT_RUNS_DIR, or in ~/rlkit-runs",
    "tokenizer_name": "the tokenizer is the model's own",
}
"""Fields without an equivalent, with the reason."""

_OWN = ("openreward_run_name", "max_total_tokens", "max_rollout_retries", "loss_fn", "loss_fn_config",
        "advantage_calculation", "system_prompt_template", "environments", "secrets", "max_active_tasks",
        "max_rollout_concurrency", "thinking")  # fmt: skip
_ENV = ("splits", "nonterminal_reward", "num_rollouts", "max_failing_rollouts", "temperature", "top_p", "top_k",
        "reward_reduction", "min_reward", "max_reward", "secrets")  # fmt: skip

_OF_ENV = {"group_size": "num_rollouts"}  # fields of rlkit's environments that have another name there
_MAX_ACTIVE_TASKS = 32  # default number of concurrent rollouts in the cookbook
_NUM_ROLLOUTS = 16  # group size if the old configuration, which has no default, does not set it


@dataclass(frozen=True)
class Conversion:
    """Converted settings, notes for the user, and the old name of each field."""

    settings: Section
    notes: list[str] = field(default_factory=list[str])
    names: dict[str, str] = field(default_factory=dict[str, str])


def convert(old: Mapping[str, Json]) -> Conversion:
    """Return the configuration equivalent to an old one; UsageError for anything that the cookbook rejects."""
    fields = [*_MOVED, *_LEFT, *_OWN]
    for name in old:
        if name not in fields:
            raise UsageError(f"{name}: the cookbook has no such field.{did_you_mean(str(name), fields)}")
    new = Conversion({})
    for name, place in _MOVED.items():
        value = _DEFAULTS.get(name) if old.get(name) is None else old[name]
        if value is not None:
            _set(new.settings, place, value)
            new.names[".".join(place)] = name
    if old.get("model_name") is None:
        new.notes.append(f"model_name: the cookbook needs it, and this trains {DEFAULT_MODEL}: name one with `model`")
    left = [name for name in _LEFT if old.get(name) not in (None, False)]
    new.notes.extend(f"{name}: not taken over: {_LEFT[name]}" for name in left)
    if (run_name := old.get("openreward_run_name")) is not None:
        new.settings["name"] = re.sub(r"[^A-Za-z0-9_.\-]+", "-", str(run_name)).strip("-._") or "run"
    _add_objective(new, old)
    _add_thinking(new, old)
    _add_environments(new, old)
    at_once = old.get("max_rollout_concurrency") or _count(old, "max_active_tasks", _MAX_ACTIVE_TASKS)
    _set(new.settings, ("rollouts", "max_concurrent"), at_once)
    if old.get("num_epochs") is None:
        new.notes.append(
            "num_epochs: the cookbook has no limit, but this run has 100 steps; set the number with `steps`"
        )
    return new


def convert_file(path: Path) -> Conversion:
    """Convert a file, and check that the result can be trained with.

    Raises:
        UsageError: the file cannot be read or converted, or the result is invalid. The message names the file,
            and fields by their old names.
    """
    old = plain(read_file(path))
    if not isinstance(old, dict):
        raise UsageError(f"{path}: a configuration is a mapping")
    try:
        new = convert(old)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    try:
        load_config([], settings=new.settings)
    except UsageError as error:
        name, separator, problem = str(error).removeprefix("python: ").partition(": ")
        raise UsageError(f"{path}: {new.names.get(name, name)}{separator}{problem}") from None
    return new


def _add_objective(new: Conversion, old: Mapping[str, Json]) -> None:
    advantage = old.get("advantage_calculation", "centered_normalized")
    if advantage in _ADVANTAGES:
        new.settings["advantage"] = _ADVANTAGES[str(advantage)]
    else:
        new.notes.append(f"advantage_calculation: {advantage} has no counterpart; the group's mean is subtracted")
    loss: Section = {"name": old.get("loss_fn", "ppo")}
    for name, value in _mapping(old, "loss_fn_config").items():
        if name in _LOSS_FIELDS:
            loss[_LOSS_FIELDS[name]] = value
        else:
            new.notes.append(f"loss_fn_config.{name}: not taken over: rlkit knows of no such setting")
    new.settings["loss"] = loss


def _add_thinking(new: Conversion, old: Mapping[str, Json]) -> None:
    from tinker_cookbook.exceptions import TinkerCookbookError
    from tinker_cookbook.model_info import get_recommended_renderer_names

    try:
        first, *others = get_recommended_renderer_names(str(old.get("model_name")))
    except (TinkerCookbookError, KeyError, ValueError):  # the model is not in the table
        first, others = "", []
    silent = f"{first}_disable_thinking"
    if not old.get("thinking") and silent in others:
        _set(new.settings, ("chat", "renderer"), silent)
    elif old.get("thinking") and silent not in others:
        new.notes.append("thinking: not taken over: choose a renderer that thinks with chat.renderer, if there is one")


def _add_environments(new: Conversion, old: Mapping[str, Json]) -> None:
    environments = _mapping(old, "environments")
    if not environments:
        raise UsageError("environments: there is none, so that there is nothing to train on")
    envs = dict[str, Json]()
    names = _short_names(list(environments))
    for target in environments:
        settings, field = _mapping(environments, target), f"environments.{target}"
        if parse_target(target).base_url is not None:
            raise UsageError(f"{field}: the cookbook knows environments of the form Owner/Name only")
        for name in settings:
            if name not in _ENV:
                raise UsageError(f"{field}.{name}: the cookbook has no such field.{did_you_mean(str(name), _ENV)}")
        envs[names[target]] = env = _environment(new, old, target, settings)
        new.names[f"envs.{names[target]}"] = field
        new.names.update({f"envs.{names[target]}.{name}": f"{field}.{_OF_ENV.get(name, name)}" for name in env})
    new.settings["envs"] = envs
    if len(envs) > 1 and old.get("num_epochs") is None:
        new.notes.append(
            "environments: drawn equally often, where the cookbook drew from all their tasks: set envs.NAME.weight, or "
            "say how long to train with `epochs`, which draw from all of them"
        )
    for name in ("top_p", "top_k"):
        values = [_mapping(environments, target).get(name) for target in environments]
        if values[0] is not None and values.count(values[0]) == len(values):
            _set(new.settings, ("sampling", name), values[0])
        elif any(value is not None for value in values):
            new.notes.append(f"{name}: not taken over: it differs between environments, and rlkit has one for a run")


def _environment(new: Conversion, old: Mapping[str, Json], target: str, spec: Mapping[str, Json]) -> Section:
    args: Section = {"target": target, "on_message": "nudge"}
    for name in ("splits", "nonterminal_reward", "reward_reduction", "min_reward", "max_reward"):
        if spec.get(name) is not None:
            args[name] = spec[name]
    args["max_total_tokens"] = _count(old, "max_total_tokens", 32768)
    args["max_turns"] = 64
    if isinstance(prompt := old.get("system_prompt_template"), str):
        args["system_prompt"] = prompt.replace("{tools}", "").strip()
        if "{tools}" in prompt:
            new.notes.append("system_prompt_template: {tools} is left out: the model's chat format shows the tools")
    if secrets := _secrets(new, {**_mapping(old, "secrets"), **_mapping(spec, "secrets")}):
        args["secrets"] = secrets
    env: Section = {"env": "openreward", "args": args}
    field = f"environments.{target}"
    env["group_size"] = size = _count(spec, "num_rollouts", _NUM_ROLLOUTS, field)
    env["temperature"] = 1.0 if spec.get("temperature") is None else spec["temperature"]
    env["max_retries"] = size * _count(old, "max_rollout_retries", 3)
    env["max_failing_rollouts"] = _count(spec, "max_failing_rollouts", 0, field)
    return env


def _count(holder: Mapping[str, Json], name: str, default: int, field: str = "") -> int:
    value = holder.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{f'{field}.{name}'.lstrip('.')}: {value!r} is no whole number")
    return value


def _secrets(new: Conversion, secrets: Mapping[str, Json]) -> Section:
    converted = dict[str, Json]()
    for name, value in secrets.items():
        if value == "":  # the cookbook's way to remove a secret of the run from an environment
            continue
        converted[name] = variable = re.sub(r"\W", "_", str(name)).upper()
        note = f"secrets.{name}: its value is not taken over: set it as {variable} in the environment or in .env"
        if value is not None and note not in new.notes:
            new.notes.append(note)
    return converted


def _short_names(targets: list[str]) -> dict[str, str]:
    """Return a unique name for each environment."""
    short = {target: _as_name(str(target).rpartition("/")[2]) for target in targets}
    shorts, names = list(short.values()), dict[str, str]()
    for target, name in short.items():
        whole = name if shorts.count(name) == 1 else _as_name(str(target))
        numbered = (f"{whole}-{number}" for number in count(2))
        names[target] = whole if whole not in names.values() else next(n for n in numbered if n not in names.values())
    return names


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]+", "-", text).lower().lstrip("-_.") or "env"


def _mapping(holder: Mapping[str, Json], name: str) -> Mapping[str, Json]:
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}: must be a mapping")
    return value


def _set(section: Section, place: tuple[str, ...], value: Json) -> None:
    for name in place[:-1]:
        section = cast("Section", section.setdefault(name, dict[str, Json]()))
    section[place[-1]] = value
