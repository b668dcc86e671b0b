"""The table of options in the documentation equals the options that runs read."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import TypeAliasType, get_args

import numpy as np
import pytest
import torch

import rlkit
from rlkit._util.sections import Section, SectionTable
from rlkit.chat.renderers import load_chat
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.loading.run_config import require_run_directory
from rlkit.config.schema import Config
from rlkit.config.schema.supervised import SourceConfig, WarmStartConfig
from rlkit.config.schema.track import track_config
from rlkit.envs.demonstrations import demonstrations
from rlkit.rollout.runner import LocalRunner
from rlkit.testing import ByteChat, SimulatedTinker, run_virtual
from rlkit.tinker_client.connect import ServiceChoice, choose_service, connect
from rlkit.trackers.from_config import load_service
from rlkit.trackers.sync import send
from rlkit.training.trainer import RLTrainer
from rlkit.types import Datum
from rlkit.workers.from_config import open_runner
from tests.simulation import Word
from tests.trackers.folders import write_run

TABLE = Path(__file__).parents[2] / "docs" / "options.md"
TASKS = [Word(number) for number in range(8)]
WORDS = {"env": f"{__file__}:TASKS"}
TRACKED = {"wandb": {"mode": "offline"}, "trackio": {}, "tensorboard": {}, "docent": {}, "openreward": {}}


TALKS = str(Path(__file__).parents[2] / "examples" / "warm_start.jsonl")


class NoDocent:
    """Docent's client, without its server."""

    def __init__(self, **_: object) -> None: ...

    def create_collection(self, **_: object) -> str:
        return "c"


DOCENT = ModuleType("docent")
DOCENT.Docent = NoDocent
DOCENT.__spec__ = ModuleSpec("docent", None)


def own_estimator(group: rlkit.Group) -> np.ndarray:
    return group.rewards - group.rewards.mean()


class Talk(rlkit.SingleTurnEnv):
    """A conversation of one reply."""

    def prompt(self) -> list[rlkit.Message]:
        return [{"role": "user", "content": "hello"}]

    def grade(self, reply: rlkit.Reply) -> float:
        return 1.0


def own_prompt(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    return messages[:1]


def own_loss(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([row.sum() for row in logprobs]).sum(), {}


RUNS: list[dict[str, object]] = [
    {},
    {"loss": {"name": "ppo"}, "advantage": {"name": "pkpo", "k": 2}, "schedule": {"mode": "async"}},
    {"loss": {"name": "cispo"}, "advantage": {"name": "entropic"}, "batch": {"normalize": "constant"}},
    {"loss": {"name": "gspo"}, "advantage": {"name": "entropic_adaptive"}, "schedule": {"mode": "stream"}},
    {"loss": {"name": "dro"}, "advantage": {"name": "entropic_valid_aware"}},
    {"sampling": {"budget_forcing": {"context_window_tokens": 4096}}, "best": {"patience": 9}},
    {"advantage": {"name": "quantile"}, "kl_penalty": {"coefficient": 0.1}, "length_penalty": {"coefficient": 0.1}},
    {"advantage": {"name": "turn_returns"}, "optimizer": {"schedule": "cosine"}},
    {"advantage": f"{__file__}:own_estimator", "prices": {"prefill": 1.0, "sample": 1.0, "train": 1.0}},
    {"loss": {"name": "custom", "function": f"{__file__}:own_loss"}},
    {"epochs": 1, "steps": None, "envs": {"words": WORDS, "more": WORDS}},
    {"envs": {"words": {**WORDS, "curriculum": {"name": "filter", "max_solve_rate": 0.9}}}},
    {"envs": {"words": {**WORDS, "curriculum": {"name": "target"}}}},
    {"source": {"files": TALKS}, "warm_start": {"files": TALKS, "steps": 1}},
]
"""Together they use every section."""

BASE: dict[str, object] = {
    "model": "simulated",
    "envs": {"words": WORDS},
    "steps": 2,
    "batch": {"groups": 2, "group_size": 3},
    "eval": {"envs": {"held_out": {**WORDS, "tasks": 2}}},
    "checkpoint": {"every": 1, "keep_last": 1},
}


@pytest.fixture
def fields_read(monkeypatch: pytest.MonkeyPatch) -> defaultdict[tuple[str, str], set[str]]:
    """Map the class and field of each section that is read to the modules that read it, validation excluded."""
    modules_by_field = defaultdict[tuple[str, str], set[str]](set)
    plain = Section.__getattribute__

    def watched(self: Section, name: str) -> object:
        if name in type(self).model_fields and (module := _reader(sys._getframe(1))) is not None:
            modules_by_field[type(self).__name__, name].add(module)
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", watched)
    return modules_by_field


_FOR_OTHERS = {("rlkit.config.schema", name) for name in ("step_count", "warm_start_steps")}
_FOR_OTHERS |= {("rlkit.config.schema.batch", "replaced_groups_limit")}
"""Properties that read fields for their callers."""

_SORTING = {"reinforced_envs", "find_field"}
"""Properties and methods that tell conversations from rollouts."""


def _reader(frame: FrameType | None) -> str | None:
    """Return the reading module; None for validation, which is a private function of the schema or raises errors."""
    modules = list[tuple[str, str]]()
    while frame is not None and len(modules) < 4:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module != __name__ and (module, function) not in _FOR_OTHERS:
            modules.append((module, function))
        frame = frame.f_back
    if any(name.startswith("rlkit.config") and function.startswith(("_", "refuse_")) for name, function in modules):
        return None
    if modules[0][1] in _SORTING:
        return None
    return modules[0][0] if modules[0][0].startswith("rlkit.") else None


def list_options() -> Mapping[str, set[tuple[str, str]]]:
    """Map each option to its classes and fields; mutually exclusive sections may share a name."""
    fields_by_option = defaultdict[str, set[tuple[str, str]]](set)

    def add(section: type[Section], prefix: str, *, tagged: bool) -> None:
        for name, field in section.model_fields.items():
            if tagged and name == "name":  # it chooses the class, and need not be read
                continue
            inner = [type(track_config(TRACKED))] if name == "track" else list(_sections_in(field.annotation))
            path = f"{prefix}{name}.<name>" if inner and "dict" in str(field.annotation) else f"{prefix}{name}"
            for inner_section in inner:
                add(inner_section, f"{path}.", tagged=len(inner) > 1)
            if not inner:
                fields_by_option[path].add((section.__name__, name))

    add(Config, "", tagged=False)
    return fields_by_option


def _sections_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, TypeAliasType):
        yield from _sections_in(annotation.__value__)
    elif isinstance(annotation, type) and issubclass(annotation, Section) and not hasattr(annotation, "kind"):
        yield annotation
    elif isinstance(annotation, SectionTable):
        yield from annotation.classes.values()
    for inner in get_args(annotation):
        yield from _sections_in(inner)


@pytest.mark.slow
def test_every_option_is_read_where_the_table_says(
    fields_read: defaultdict[tuple[str, str], set[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    byte_model_dir: Path,
) -> None:
    prices = {"prefill": 1.0, "sample": 1.0, "train": 1.0}
    teacher = {"model": str(byte_model_dir), "prices": prices, "prompt": f"{__file__}:own_prompt"}
    taught: dict[str, object] = {
        "envs": {"talk": {"env": f"{__file__}:Talk", "teacher": teacher, "reward": "none"}, "words": WORDS},
        "teacher": {},
        "loss": "distillation",
        "chat": {"tokenizer": str(byte_model_dir)},
        "prices": prices,
    }
    for number, settings in enumerate([*RUNS, taught]):
        for resume in (False, True):
            trainer = RLTrainer(
                load_config([], settings=BASE | {"steps": 3 if resume else 2} | settings),
                directory=tmp_path / f"{number}",
                resume=resume,
                service=SimulatedTinker(),
                chat=ByteChat(),
            )
            with suppress(rlkit.RunFailed):
                run_virtual(trainer.train())
    # What only a real service, or a run of a name, has to be told.
    config = load_config([], settings={"envs": {"words": WORDS}, "name": "x", "model": str(byte_model_dir)}).config
    require_run_directory(config)
    load_chat(config, engine=choose_service(config.service, environ={}).kind == "engine", note=lambda note: None)
    # A run on virtual time has no workers.
    workers = {"rollouts": {"workers": {"count": 1}}, "envs": {"words": {**WORDS, "workers": None}}}
    asyncio.run(_open_workers(load_config([], settings=BASE | workers)))
    # Processes beside a run read these.
    monkeypatch.setenv("DOCENT_API_KEY", "the-key")
    monkeypatch.setenv("OPENREWARD_API_KEY", "the-key")
    monkeypatch.setitem(sys.modules, "docent", DOCENT)
    for name, section in TRACKED.items():
        send(write_run(tmp_path / name, steps=0), load_service(name, section))
    monkeypatch.setattr("rlkit.engine.EngineServer.start", _refused)
    with suppress(ConnectionRefusedError):
        asyncio.run(connect(config.service, choice=choose_service(config.service, environ={})).__aenter__())
    elsewhere = ServiceChoice("url", "http://127.0.0.1:1", "nobody listens there")
    quick = config.service.model_copy(update={"connect_timeout_s": 0.01})
    with suppress(rlkit.MissingError):
        asyncio.run(connect(quick, choice=elsewhere).__aenter__())

    for name in inspect.signature(demonstrations).parameters.keys() & SourceConfig.model_fields.keys():
        for section in (SourceConfig, WarmStartConfig):  # they are passed as arguments
            fields_read[section.__name__, name].add("rlkit.envs.demonstrations")
    acts = {
        option: ", ".join(sorted(f"`{module}`" for module in set.union(*(fields_read[place] for place in places))))
        for option, places in list_options().items()
    }
    for option, places in list_options().items():
        assert all(fields_read[place] for place in places), f"nothing reads {option}"
    rows = [f"| `{option}` | {modules} |" for option, modules in acts.items()]
    assert [line for line in TABLE.read_text().splitlines() if line.startswith("| `")] == rows


async def _open_workers(resolved: ResolvedConfig) -> None:
    tasks = {name: load_envs(name, env, field=name, seed=0) for name, env in resolved.config.envs.items()}
    async with open_runner(resolved.config, LocalRunner(ByteChat()), tasks, {}):
        pass


def _refused(*_: object) -> None:
    raise ConnectionRefusedError
