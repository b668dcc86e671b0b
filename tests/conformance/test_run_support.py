"""A run on a service that lacks a part of the protocol ends before its first rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.engine import EngineServer
from rlkit.errors import UsageError
from rlkit.tinker_client.connector import ServiceAddress
from rlkit.tinker_client.sdk import TinkerService
from rlkit.training.trainer import RLTrainer

from .wrong_service import Fault, Json, WrongService


class Word(rlkit.SingleTurnEnv):
    """A task that counts its rollouts."""

    rollouts: list[str] = []  # noqa: RUF012  counted across copies

    def prompt(self) -> list[rlkit.Message]:
        return [{"role": "user", "content": "word"}]

    def grade(self, reply: rlkit.Reply) -> float:
        self.rollouts.append(reply.text)
        return float(len(reply.text) % 2)


@pytest.fixture(scope="module")
def wrong(byte_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrongService]:
    root = tmp_path_factory.mktemp("support")
    with (
        EngineServer(root=root, resolve=lambda name: byte_model_dir, api_key="tml-k", threads=1) as server,
        WrongService(server.url) as wrong,
    ):
        yield wrong


def advise(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    return [{"role": "system", "content": "Say it."}, *messages]


def _train(wrong: WrongService, model: Path, directory: Path, settings: dict[str, object]) -> None:
    Word.rollouts.clear()
    base = {
        "model": str(model),
        "steps": 1,
        "batch": {"groups": 1, "group_size": 2},
        "sampling": {"max_tokens": 2},
        "envs": {"word": {}},
        "checkpoint": {"every": 0},
        "optimizer": {"learning_rate": 1e-3},
    }
    config = load_config([], settings=base | settings)
    service = TinkerService(ServiceAddress(base_url=wrong.url, api_key="tml-k"))
    asyncio.run(RLTrainer(config, envs={"word": [Word()]}, directory=directory, service=service).train())


def _refuse(path: str) -> Fault:
    return Fault(status=lambda actual, body: 404 if actual == path else None)


def _refuse_scores(path: str, body: Json) -> int | None:
    return 422 if path == "asample" and body.get("prompt_logprobs") else None


def _refuse_likeliest(path: str, body: Json) -> int | None:
    return 422 if path == "asample" and body.get("topk_prompt_logprobs") else None


def _set_no_such_loss(request: object) -> None:
    request.loss_fn = "nosuch"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "settings", "need"),
    [
        (Fault(train=_set_no_such_loss), {"loss": {"name": "gspo"}}, "the loss 'gspo'"),
        (_refuse("save_weights"), {}, "saving checkpoints"),
        (Fault(status=_refuse_scores), {"kl_penalty": {"coefficient": 0.1}}, "log-probabilities of prompts"),
        (
            Fault(status=_refuse_likeliest),
            {"teacher": {"prompt": f"{__name__}:advise"}, "loss": "distillation"},
            "the likeliest tokens of prompts, or several targets: loss.top_tokens 20",
        ),
    ],
    ids=["loss", "checkpoints", "scores", "likeliest"],
)
def test_a_run_names_what_the_service_lacks(
    wrong: WrongService, byte_model_dir: Path, tmp_path: Path, fault: Fault, settings: dict[str, object], need: str
) -> None:
    wrong.fault = fault
    with pytest.raises(UsageError, match=f"the service lacks {need}.*rlkit check service"):
        _train(wrong, byte_model_dir, tmp_path / "run", settings)
    assert Word.rollouts == []
    wrong.fault = Fault()
    _train(wrong, byte_model_dir, tmp_path / "right", settings)
    assert len(Word.rollouts) == 2
