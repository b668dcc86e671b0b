"""rlkit: post-train open-weight language models by reinforcement learning through the Tinker API.

Everything public is here. Names are loaded when they are first used, so that `import rlkit` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.algorithms.advantages import AdvantageEstimator, step_estimator
    from rlkit.api import train
    from rlkit.config.loading.load import load_config
    from rlkit.config.schema import Config
    from rlkit.dry_run.rehearse import rehearse
    from rlkit.env import Env, SingleTurnEnv, Step, StepEnv, TaskSource, ToolEnv
    from rlkit.envs.callable import CallableEnv
    from rlkit.envs.process import ProcessEnv, ProcessResult
    from rlkit.errors import (
        ConfigError,
        EnvironmentFault,
        LimitReached,
        MissingError,
        RewardError,
        RlkitError,
        RunFailed,
        ServiceError,
        UsageError,
    )
    from rlkit.evaluation.evaluate import evaluate
    from rlkit.judges.judge import Judge, JudgementError
    from rlkit.policy import Policy
    from rlkit.trackers import Progress, RunInfo, RunResult, Tracker
    from rlkit.training import StopSignal, Trainer
    from rlkit.training.trainer import RLTrainer
    from rlkit.types import Checkpoint, Episode, Group, Message, Outcome, Prompt, Reply, Tool, ToolCall, Turn
    from rlkit.workers.resource import WorkerResource

_MODULES = {
    "algorithms.advantages": ["AdvantageEstimator", "step_estimator"],
    "api": ["train"],
    "config.loading.load": ["load_config"],
    "config.schema": ["Config"],
    "env": ["Env", "SingleTurnEnv", "Step", "StepEnv", "TaskSource", "ToolEnv"],
    "envs.process": ["ProcessEnv", "ProcessResult"],
    "errors": [
        "ConfigError",
        "EnvironmentFault",
        "LimitReached",
        "MissingError",
        "RewardError",
        "RlkitError",
        "RunFailed",
        "ServiceError",
        "UsageError",
    ],
    "envs.callable": ["CallableEnv"],
    "judges.judge": ["Judge", "JudgementError"],
    "policy": ["Policy"],
    "evaluation.evaluate": ["evaluate"],
    "dry_run.rehearse": ["rehearse"],
    "training.trainer": ["RLTrainer"],
    "trackers": ["Progress", "RunInfo", "RunResult", "Tracker"],
    "training": ["StopSignal", "Trainer"],
    "workers.resource": ["WorkerResource"],
    "types": ["Checkpoint", "Episode", "Group", "Message", "Outcome", "Prompt", "Reply", "Tool", "ToolCall", "Turn"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdvantageEstimator",
    "CallableEnv",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Env",
    "EnvironmentFault",
    "Episode",
    "Group",
    "Judge",
    "JudgementError",
    "LimitReached",
    "Message",
    "MissingError",
    "Outcome",
    "Policy",
    "ProcessEnv",
    "ProcessResult",
    "Progress",
    "Prompt",
    "RLTrainer",
    "Reply",
    "RewardError",
    "RlkitError",
    "RunFailed",
    "RunInfo",
    "RunResult",
    "ServiceError",
    "SingleTurnEnv",
    "Step",
    "StepEnv",
    "StopSignal",
    "TaskSource",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "Tracker",
    "Trainer",
    "Turn",
    "UsageError",
    "WorkerResource",
    "evaluate",
    "load_config",
    "rehearse",
    "step_estimator",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'rlkit' has no attribute {name!r}")
    return getattr(import_module(f"rlkit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
