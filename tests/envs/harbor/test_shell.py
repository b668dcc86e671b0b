"""The shell agent, in real trials in the local sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harbor.models.trial.config import EnvironmentConfig

from rlkit._util import threads
from rlkit.envs.harbor.settings import Agent, TrialSettings
from rlkit.envs.harbor.task import HarborTask
from rlkit.errors import EnvironmentFault, ServiceError, UsageError
from rlkit.policy import Limits
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.testing import ScriptedPolicy
from rlkit.types import Json, Outcome

from .conftest import AgentTime, left
from .playing import Faulty, recording, whole, write_simple

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

DO = "echo done > out"


@pytest.fixture
def task(cache: Path, tmp_path: Path) -> Path:
    return write_simple(tmp_path / "task")


def played(task: Path, policy: object, *, max_turns: int = 8, **options: Json) -> Outcome:
    """Play a trial with the shell agent."""
    agent = Agent("shell", max_turns=max_turns, kwargs=options)

    @stop_leftover_tasks()
    async def main() -> Outcome:
        return await HarborTask("simple", task, TrialSettings(agent=agent)).rollout(policy)

    return threads.run(main())


def ending(outcome: Outcome) -> tuple[float, object, float]:
    """The reward, why the agent stopped, and its turns."""
    return outcome.reward, outcome.info["ended"], outcome.metrics["agent_turns"]


def shown_messages(policy: ScriptedPolicy) -> list[str]:
    """The last message of each prompt but the first, as the model was shown it."""
    return [
        prompt.rpartition(reply)[2].strip() for prompt, reply in zip(policy.prompts[1:], _replies(policy), strict=False)
    ]


def _replies(policy: ScriptedPolicy) -> list[str]:
    return [policy.chat_format.decode(turn.completion).strip() for turn in policy.turns]


@pytest.mark.parametrize("end", ["exit", "done", "", "```\nexit\n```"])
def test_a_command_solves_a_task_and_a_final_word_ends_the_episode(task: Path, cache: Path, end: str) -> None:
    policy = ScriptedPolicy([DO, end])
    outcome = played(task, policy)
    assert ending(outcome) == (1.0, "completed", 2.0)
    assert outcome.metrics["seconds/verifier"] > 0
    assert shown_messages(policy) == ["(no output)"]
    assert left(cache) == []


def test_a_task_that_is_not_solved_earns_nothing(task: Path) -> None:
    assert ending(played(task, ScriptedPolicy(["echo wrong > out", "exit"]))) == (0.0, "completed", 2.0)


def test_a_bad_command_is_answered_with_its_error_and_its_exit_status(task: Path) -> None:
    policy = ScriptedPolicy(["nosuch --command", "echo 'open", "rm missing", DO, "exit"])
    assert ending(played(task, policy)) == (1.0, "completed", 5.0)
    answers = shown_messages(policy)
    assert "nosuch: command not found" in answers[0]
    assert answers[0].endswith("(exit status 127)")
    assert "unexpected EOF" in answers[1]
    assert answers[2].endswith("(exit status 1)")
    assert answers[3] == "(no output)"


def test_the_shell_stays_in_the_folder_of_the_last_cd(task: Path) -> None:
    policy = ScriptedPolicy(["mkdir deep && cd deep", "pwd", "cd ..", DO, "exit"])
    assert ending(played(task, policy)) == (1.0, "completed", 5.0)
    assert shown_messages(policy)[1] == "/app/deep"


def test_an_agent_that_runs_out_of_turns_is_graded(task: Path) -> None:
    outcome = played(task, ScriptedPolicy([DO, "ls"]), max_turns=2)
    assert ending(outcome) == (1.0, "max_turns", 2.0)
    assert (outcome.truncated, outcome.metrics["max_turns"]) == (True, 1.0)
    limited = ScriptedPolicy([DO, "ls"], limits=Limits(max_turns=2))
    assert ending(played(task, limited)) == (1.0, "max_turns", 2.0)


def test_an_agent_with_one_turn_is_not_truncated(task: Path) -> None:
    policy = ScriptedPolicy([DO])
    outcome = played(task, policy, max_turns=1, examples=[["Make a.", "touch a"], ["Make b.", "touch b"]])
    assert ending(outcome) == (1.0, "completed", 1.0)
    assert (outcome.truncated, outcome.metrics["max_turns"]) == (False, 0.0)
    assert [line for line in policy.prompts[0].splitlines() if line] == [
        *("You work in a Linux shell. Reply with one command and nothing else.", "Make a.", "touch a"),
        *("Make b.", "touch b", "Greet."),
    ]


def test_huge_and_binary_output_becomes_short_printable_text(task: Path) -> None:
    policy = ScriptedPolicy(["yes | head -c 30000000", "head -c 2000 /dev/urandom; printf 'a\\0b'", DO, "exit"])
    assert ending(played(task, policy, output_chars=100)) == (1.0, "completed", 4.0)
    answers = shown_messages(policy)
    assert all(len(answer) < 200 for answer in answers)
    assert "characters left out" in answers[0]
    assert answers[1].endswith("a\ufffdb")


def test_an_endless_command_is_killed_and_the_agent_continues(task: Path) -> None:
    policy = ScriptedPolicy(["sleep 1000 & echo started", "while true; do :; done", DO, "exit"])
    assert ending(played(task, policy, command_timeout_s=1)) == (1.0, "completed", 4.0)
    assert shown_messages(policy) == ["started", "(the command was ended after 1 s)", "(no output)"]


def test_a_truncated_reply_or_one_without_a_command_is_not_run(task: Path) -> None:
    long = f"{DO}; " + "x" * 50
    policy = ScriptedPolicy([long, "```bash", "exit"], max_tokens=40)
    outcome = played(task, policy)
    assert ending(outcome) == (0.0, "completed", 3.0)
    assert (outcome.metrics["truncated_turns"], outcome.metrics["parse_errors"]) == (1.0, 1.0)
    assert "cut off after 40 tokens" in policy.prompts[1]
    assert "holds no command" in policy.prompts[2]


def test_every_prompt_extends_the_exact_tokens_of_the_turn_before(task: Path) -> None:
    policy = ScriptedPolicy(["<think>first\n a look </think>\n\n  ls  ", "cat missing", DO, "exit"])
    played(task, policy, examples=[["Make a.", "touch a"], ["Make b and c.", "touch b", "touch c"]])
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2]
    prompts = [request.prompt.tokens.tolist() for request in policy.sampler.requests]
    rebuilt = [whole(policy.turns, place)[: -len(turn.completion)] for place, turn in enumerate(policy.turns)]
    assert rebuilt == prompts
    assert [line for line in policy.prompts[0].splitlines() if line][1:] == [
        *("Make a.", "touch a", "(no output)", "exit"),
        *("Make b and c.", "touch b", "(no output)", "touch c", "(no output)", "exit", "Greet."),
    ]


def test_a_full_context_and_a_failing_service_end_the_agent_and_the_verifier_runs(task: Path) -> None:
    full = ScriptedPolicy([DO, "seq 400", "ls"], limits=Limits(context_tokens=1000), max_tokens=100)
    outcome = played(task, full)
    assert ending(outcome) == (1.0, "overflow", 2.0)
    with pytest.raises(ServiceError, match="503"):
        played(task, recording(Faulty([DO], failing=range(1, 9))))


def test_a_timeout_keeps_the_finished_turns(task: Path, agent_time: AgentTime) -> None:
    policy = recording(Faulty([DO], hanging=1, on_hang=agent_time.end))
    settings = TrialSettings(agent=Agent("shell"), agent_timeout_s=agent_time.limit_s)
    outcome = threads.run(HarborTask("simple", task, settings).rollout(policy))
    assert ending(outcome) == (1.0, "timeout", 1.0)


def failing_at_work(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after_s: float = 0.0) -> None:
    """Have the environment fail under the command that does the work."""
    from rlkit.envs.harbor.sandbox import LocalSandbox

    whole_exec = LocalSandbox.exec

    async def fail_on_work(self: LocalSandbox, command: str, *args: object, **kwargs: object) -> object:
        if DO in command:
            await asyncio.sleep(after_s)
            raise error
        return await whole_exec(self, command, *args, **kwargs)

    monkeypatch.setattr(LocalSandbox, "exec", fail_on_work)


@pytest.mark.parametrize(
    ("error", "after_s"),
    [
        (ConnectionError("the machine is gone"), 0.0),
        (ConnectionError("the machine is gone"), 1.1),
        (RuntimeError("Docker compose command failed. Stdout: Command timed out after 1 seconds"), 1.1),
        (TimeoutError("the machine does not answer"), 0.0),
    ],
)
def test_an_environment_failure_is_not_blamed_on_the_model(
    task: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, after_s: float
) -> None:
    failing_at_work(monkeypatch, error, after_s=after_s)
    message = rf"environment_error: EnvironmentDown: the environment failed: {type(error).__name__}: {error}"
    with pytest.raises(EnvironmentFault, match=message):
        played(task, ScriptedPolicy([DO, "exit"]), command_timeout_s=1)


@pytest.mark.parametrize(
    ("error", "after_s"),
    [
        (RuntimeError("Command timed out after 1 seconds"), 0.0),  # as Harbor's engines of containers say it
        (RuntimeError("oc command timed out after 1 seconds: oc exec"), 0.0),
        (TimeoutError(), 1.1),
    ],
)
def test_every_kind_of_command_timeout_is_recognised(
    task: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, after_s: float
) -> None:
    failing_at_work(monkeypatch, error, after_s=after_s)
    policy = ScriptedPolicy([DO, "exit"])
    assert ending(played(task, policy, command_timeout_s=1)) == (0.0, "completed", 2.0)
    assert shown_messages(policy) == ["(the command was ended after 1 s)"]


def test_the_conversation_is_kept_with_the_trial(task: Path, tmp_path: Path) -> None:
    settings = TrialSettings(agent=Agent("shell"), trials_dir=tmp_path / "trials", keep="all")
    threads.run(HarborTask("simple", task, settings).rollout(ScriptedPolicy([DO, "exit"])))
    (path,) = (tmp_path / "trials").glob("*/agent/transcript.jsonl")
    messages = [json.loads(line) for line in path.read_text().splitlines()]
    assert [message["content"] for message in messages[1:]] == ["Greet.", DO, "(no output)", "exit"]


def test_a_link_planted_in_place_of_the_record_overwrites_nothing(task: Path, tmp_path: Path) -> None:
    host_file = tmp_path / "held"
    host_file.write_text("the host's")
    settings = TrialSettings(
        agent=Agent("shell"),
        environment=EnvironmentConfig(import_path="tests.envs.harbor.environments:Mounted"),
        trials_dir=tmp_path / "trials",
        keep="all",
    )
    link = f"ln -s {host_file} /logs/agent/transcript.jsonl"
    outcome = threads.run(HarborTask("simple", task, settings).rollout(ScriptedPolicy([link, DO, "exit"])))
    assert ending(outcome) == (1.0, "completed", 3.0)
    (path,) = (tmp_path / "trials").glob("*/agent/transcript.jsonl")
    assert (host_file.read_text(), path.is_symlink()) == ("the host's", False)
    assert json.loads(path.read_text().splitlines()[2])["content"] == link


def test_an_unwritable_record_does_not_hide_the_end_of_the_agent(task: Path, tmp_path: Path) -> None:
    environment = EnvironmentConfig(import_path="tests.envs.harbor.environments:Mounted")
    settings = TrialSettings(agent=Agent("shell"), environment=environment, trials_dir=tmp_path / "trials", keep="all")
    policy = ScriptedPolicy(["mkdir -p /logs/agent/transcript.jsonl/in", DO, "exit"])
    assert ending(threads.run(HarborTask("simple", task, settings).rollout(policy))) == (1.0, "completed", 3.0)
    (path,) = (tmp_path / "trials").glob("*/trial.log")
    assert "transcript.jsonl was not written: " in path.read_text()


def test_steps_of_a_task_are_separate_conversations(task: Path) -> None:
    steps = '\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    (task / "task.toml").write_text((task / "task.toml").read_text() + steps)
    for name in ("one", "two"):
        (task / "steps" / name / "tests").mkdir(parents=True)
        (task / "steps" / name / "instruction.md").write_text(f"Do {name}.")
        (task / "steps" / name / "tests" / "test.sh").write_text((task / "tests" / "test.sh").read_text())
    policy = ScriptedPolicy(["cd /", "exit", "pwd", DO, "exit"])
    outcome = played(task, policy)
    assert ending(outcome) == (0.5, "completed", 5.0)
    assert "/app" in policy.prompts[3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kwargs": {"output_char": 3}}, "agent_kwargs.output_char: unknown. Did you mean 'output_c"),
        ({"kwargs": {"command_timeout_s": 0}}, "agent_kwargs.command_timeout_s: .*greater than"),
        ({"kwargs": {"examples": [["ls"]]}}, "agent_kwargs.examples.0: .*at least 2 items"),
        (
            {"max_turns": 1, "kwargs": {"examples": [["a", "b", "c"]]}},
            "examples.0: 2 commands, and max_turns is 1",
        ),
        ({"kwargs": {"max_turns": 3}}, "agent_kwargs: max_turns cannot be set here; set max_turns"),
        ({"parser": "xml"}, "parser has no effect on the shell agent"),
        ({"summarize": True}, "summarize has no effect on the shell agent"),
    ],
)
def test_ineffective_or_invalid_settings_are_errors_before_a_run(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Agent("shell", **settings)  # type: ignore[arg-type]  as a configuration gives them


def test_the_shell_agent_does_not_import_dependencies_of_terminus() -> None:
    loads = "import rlkit.envs.harbor.agents.shell, rlkit.envs.harbor.task, harbor.trial.trial"
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"{loads}; import sys; print('litellm' in sys.modules)"],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"
