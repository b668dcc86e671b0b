"""Environments draw their episodes; drawing never changes an outcome."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

import rlkit
from rlkit._util.threads import run
from rlkit.env import Task
from rlkit.policy import Limits, Samplers
from rlkit.rollout.runner import LocalRunner, Rollout
from rlkit.rollout.settings import EnvSettings
from rlkit.store.history import load_history
from rlkit.testing import ScriptedPolicy
from rlkit.token_records.pictures import add_picture, copy_view_scripts, has_picture
from rlkit.types import Episode, Sampling
from tests.builders import episode
from tests.simulation import Simulation, Word

SCRIPT = "addEventListener('message', () => {})"


class Drawn(Word):
    """Draws the text of its reply's length, or whatever it is given."""

    def __init__(self, number: int, picture: object = None) -> None:
        super().__init__(number)
        self.picture = picture

    def render(self, episode: Episode) -> object:
        if isinstance(self.picture, BaseException):
            raise self.picture
        return self.picture or f"<b>{episode.reward} after {len(episode.turns)} turn</b>"


class Silent(Drawn):
    def render(self, episode: Episode) -> object:
        return None


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Word]:
    """Environment of a module in the folder of the test."""
    path = tmp_path / "own_words.py"
    path.write_text("from tests.simulation import Word\nclass Own(Word):\n    pass\n")
    spec = importlib.util.spec_from_file_location("own_words", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_words", module)
    spec.loader.exec_module(module)
    return module.Own


def test_a_run_records_what_environments_draw(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", tasks=[Drawn(number) for number in range(4)])
    run.train()
    groups = [member.group for member in load_history(tmp_path / "run").groups(1)]
    episodes = [each for group in groups for each in group.episodes]
    assert episodes
    for each in episodes:
        assert each.info["view"] == {"html": f"<b>{each.reward} after 1 turn</b>"}


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        (ValueError("no <b>ink</b>"), "ValueError: no &lt;b&gt;ink&lt;/b&gt;"),
        (SystemExit(3), "SystemExit: 3"),
        (3, "TypeError: it returned a int, not HTML as a string"),
        ("x" * (1 << 21), "more than 1,048,576 bytes"),
    ],
)
def test_a_picture_that_fails_says_why(picture: object, reason: str) -> None:
    played = episode(0.5)
    drawn = add_picture(Drawn(1, picture), played)
    assert (drawn.reward, drawn.status, drawn.turns) == (0.5, "completed", played.turns)
    assert reason in str(drawn.info["view"])
    assert "Drawn.render failed" in str(drawn.info["view"])


def test_an_environment_need_not_draw() -> None:
    played = episode(0.5)
    assert not has_picture(Word(1))
    assert has_picture(Silent(1))
    assert add_picture(Silent(1), played) is played


def test_a_picture_is_drawn_in_a_thread_within_the_time_limit() -> None:
    threads, is_over = set[threading.Thread](), threading.Event()

    class Slow(rlkit.Env):
        async def rollout(self, policy: rlkit.Policy) -> float:
            return 1.0

        def render(self, episode: Episode) -> str:
            threads.add(threading.current_thread())
            is_over.wait(60)
            return "late"

    async def play() -> Episode:
        settings = EnvSettings(1, Sampling(max_tokens=8), 0.2, 0, Limits())
        runner = LocalRunner(None, lambda sampling, limits: ScriptedPolicy([]))
        rollout = Rollout(0, settings, 0, 0, 0, "train")
        return await runner.play(Task(0, "words", Slow()), rollout, Samplers(refuse, refuse))

    def refuse() -> NoReturn:
        raise AssertionError

    try:
        played = run(play())
    finally:
        is_over.set()
    assert threads and threading.main_thread() not in threads
    assert "Slow.render failed: the picture took longer than 0.2 s (timeout_s)" in str(played.info["view"])
    assert played.reward == 1.0


def test_a_script_beside_the_environment_is_copied(tmp_path: Path, own: type[Word]) -> None:
    folder = tmp_path / "artefacts"
    tasks: dict[str, Sequence[rlkit.Env]] = {"own": [own(1)], "bare": [Word(1)], "object": [], "empty": []}
    copy_view_scripts(tasks, folder)
    assert not folder.exists()
    (tmp_path / "view.js").write_text(SCRIPT)
    copy_view_scripts(tasks, folder)
    assert [str(path.relative_to(folder)) for path in folder.rglob("*.js")] == ["own/view.js"]
    assert (folder / "own" / "view.js").read_text() == SCRIPT


def test_a_run_keeps_the_script_of_its_environment(tmp_path: Path, own: type[Word]) -> None:
    (tmp_path / "view.js").write_text(SCRIPT)
    Simulation(tmp_path / "run", tasks=[own(number) for number in range(4)]).train()
    (script,) = (tmp_path / "run" / "artefacts").rglob("view.js")
    assert script.read_text() == SCRIPT
