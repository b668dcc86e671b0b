"""What the frameworks of others have no part in is refused, and named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import rlkit
from rlkit.interop import as_chat, name_tasks
from rlkit.policy import ChatRequest, SampleRequest


class Named(rlkit.Env):
    def __init__(self, task_id: str | None) -> None:
        self.task_id = task_id

    async def rollout(self, policy: rlkit.Policy) -> float:
        return 1.0


class Compared(Named):
    async def score_group(self, episodes: Sequence[rlkit.Episode]) -> list[float]:
        return [1.0 for _ in episodes]


def test_tasks_have_names_of_their_own() -> None:
    assert list(name_tasks([Named("a"), Named(None)])) == ["a", "1"]
    assert list(name_tasks([Named("a"), Named("b"), Named("a")])) == ["0:a", "1:b", "2:a"]


def test_a_task_that_scores_its_group_is_refused() -> None:
    with pytest.raises(rlkit.UsageError, match="Compared scores its episodes as a group"):
        name_tasks([Named("a"), Compared("b")])


def test_a_text_prompt_is_a_message_of_the_user() -> None:
    request = as_chat(SampleRequest("4 + 5 =", (), 7, 0.5, None))
    assert request == ChatRequest([{"role": "user", "content": "4 + 5 ="}], (), (), 7, 0.5, 1, None)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SampleRequest([1, 2], (), None, None, None), "accepts neither tokens nor `stop`"),
        (SampleRequest("4 + 5 =", (), None, None, ["\n"]), "accepts neither tokens nor `stop`"),
        (SampleRequest("4 + 5 =", "9", None, None, None), "cannot force the start of a reply"),
        (ChatRequest([], (), "9", None, None, 1, None), "cannot force the start of a reply"),
    ],
)
def test_a_request_without_an_equal_in_chats_is_refused(request_: SampleRequest | ChatRequest, message: str) -> None:
    with pytest.raises(rlkit.EnvironmentFault, match=message):
        as_chat(request_)
