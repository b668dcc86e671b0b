"""Real trials of conditions in which Harbor's own agent and language models lose or corrupt training data."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkit.errors import ServiceError, UsageError
from rlkit.policy import Limits
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.testing import ScriptedPolicy

from .conftest import AgentTime
from .playing import DO, DONE, PATIENT_TEST, Faulty, make_reply, play, recording, reward, said_xml, whole, write_simple

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]


@pytest.fixture
def task(cache: Path, tmp_path: Path) -> Path:
    return write_simple(tmp_path / "task")


def requested_prompts(policy: object) -> list[list[int]]:
    return [request.prompt.tokens.tolist() for request in policy.sampler.requests]


def recorded(policy: object) -> list[list[int]]:
    """The prompt of each turn, rebuilt from the record."""
    return [whole(policy.turns, n)[: -len(turn.completion) or None] for n, turn in enumerate(policy.turns)]


def test_every_prompt_extends_the_exact_tokens_of_the_turn_before_thinking_included(task: Path) -> None:
    policy = ScriptedPolicy([f"<think>first\n I think </think>\n\n {make_reply(DO)}  ", *DONE])
    result, end = asyncio.run(play(task, policy))
    assert (result.exception_info, reward(result)) == (None, 1.0)
    assert (end.reason, end.turns, end.parse_errors, end.truncated_turns) == ("completed", 3, 0, 0)
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]
    assert recorded(policy) == requested_prompts(policy)
    assert "<think>first\n I think </think>\n\n " in policy.prompts[-1]  # as it was sampled, and not as it was read


def test_a_truncated_turn_is_recorded_and_answered(task: Path) -> None:
    policy = ScriptedPolicy([make_reply(DO, analysis="very " * 100), make_reply(DO), *DONE], max_tokens=400)
    result, end = asyncio.run(play(task, policy))
    assert (reward(result), end.reason, end.turns, end.truncated_turns) == (1.0, "completed", 4, 1)
    assert [turn.stop for turn in policy.turns] == ["length", "stop", "stop", "stop"]
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2]
    assert recorded(policy) == requested_prompts(policy)
    assert "NONE of the actions you just requested were performed because you exceeded 400" in policy.prompts[1]


def test_truncated_turns_count_as_turns(task: Path) -> None:
    policy = ScriptedPolicy(lambda prompt: "endless " * 100, max_tokens=300)
    result, end = asyncio.run(play(task, policy, max_turns=3))
    assert (reward(result), end.reason, end.truncated_turns, len(policy.turns)) == (0.0, "max_turns", 3, 3)


def test_a_complete_xml_response_in_a_truncated_turn_is_executed(task: Path) -> None:
    (task / "tests" / "test.sh").write_text(PATIENT_TEST)
    cut = said_xml(DO) + "and then " * 100
    policy = ScriptedPolicy([cut, said_xml(complete=True), said_xml(complete=True)], max_tokens=400)
    result, end = asyncio.run(play(task, policy, parser_name="xml"))
    assert (result.exception_info, reward(result)) == (None, 1.0)
    assert (end.reason, end.truncated_turns, end.parse_errors) == ("completed", 1, 0)
    assert [turn.parent for turn in policy.turns] == [None, 0, 1]
    assert recorded(policy) == requested_prompts(policy)


def test_an_overflow_after_the_task_is_solved_still_gets_its_reward(task: Path) -> None:
    (task / "tests" / "test.sh").write_text(PATIENT_TEST)
    policy = ScriptedPolicy([make_reply(DO, analysis="b" * 400)], limits=Limits(context_tokens=4000), max_tokens=600)
    result, end = asyncio.run(play(task, policy))
    assert (result.exception_info, reward(result)) == (None, 1.0)
    assert (end.reason, end.turns, len(policy.turns)) == ("overflow", 1, 1)
    assert "a reply needs 600" in end.detail


def test_a_reply_cut_off_by_the_context_is_recorded_as_an_overflow(task: Path) -> None:
    policy = ScriptedPolicy([make_reply(DO, analysis="b" * 4000)], limits=Limits(context_tokens=4000))
    result, end = asyncio.run(play(task, policy, reserve_tokens=100))
    assert (reward(result), end.reason, end.turns) == (0.0, "overflow", 0)
    assert [turn.stop for turn in policy.turns] == ["length"]


def test_service_errors_in_a_row_end_the_agent_and_the_verifier_runs(task: Path) -> None:
    (task / "tests" / "test.sh").write_text(PATIENT_TEST)
    sampler = Faulty([make_reply(DO)], failing=range(1, 100))
    policy = recording(sampler)
    result, end = asyncio.run(play(task, policy))
    assert (result.exception_info, reward(result)) == (None, 1.0)
    assert (end.reason, end.turns, len(policy.turns)) == ("service_error", 1, 1)
    assert isinstance(end.error, ServiceError)
    assert sampler.calls == 2  # what retries is the policy, not the agent over it


def test_an_agent_can_leave_service_errors_to_harbor(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit.envs.harbor.agents.terminus import PolicyTerminus2

    monkeypatch.setattr(PolicyTerminus2, "raised_reasons", frozenset({"service_error"}))
    result, end = asyncio.run(play(task, recording(Faulty([], failing=range(1)))))
    assert (result.exception_info.exception_type, reward(result), end.reason) == ("ServiceError", None, "service_error")


def test_transient_service_errors_do_not_affect_a_trial(task: Path) -> None:
    async def main() -> None:
        notes: list[str] = []
        sampler = Faulty([make_reply(DO), *DONE], failing=range(1, 2))
        policy = recording(PatientSampler(sampler, ServiceWatch(notes.append, timeout_s=60), 0))
        result, end = await play(task, policy)
        assert (reward(result), end.reason, len(policy.turns), len(notes)) == (1.0, "completed", 3, 1)

    asyncio.run(main())


SUMMARY = ["The summary.", "What? Why?", "This. That."]


def test_a_proactive_summary_is_trained_on_as_what_it_was(task: Path) -> None:
    said_first = make_reply(DO, analysis="b" * 1500)
    policy = ScriptedPolicy([said_first, *SUMMARY, *DONE], limits=Limits(context_tokens=20_000), max_tokens=4000)
    options = {"enable_summarize": True, "proactive_summarization_threshold": 15_500}
    result, end = asyncio.run(play(task, policy, **options))
    assert (result.exception_info, reward(result)) == (None, 1.0)
    assert (end.reason, end.turns, end.summaries) == ("completed", 3, 1)
    # The summary and the answers go on from the first turn; the questions and what follows begin anew.
    assert [turn.parent for turn in policy.turns] == [None, 0, None, 1, None, 4]
    assert recorded(policy) == requested_prompts(policy)
    assert "This. That." in policy.prompts[4]
    assert said_first not in policy.prompts[4]


def test_a_summary_when_the_context_is_full_goes_on_with_the_task(task: Path) -> None:
    # The second turn's observation does not fit, so that the turns are unwound to the first and summed up.
    replies = [
        make_reply(analysis="b" * 200),
        make_reply("seq 1000 2200\n", duration=0.3),
        *SUMMARY,
        make_reply(DO),
        *DONE,
    ]
    policy = ScriptedPolicy(replies, limits=Limits(context_tokens=9000), max_tokens=1000)
    result, end = asyncio.run(play(task, policy, enable_summarize=True, proactive_summarization_threshold=0))
    assert (result.exception_info, reward(result)) == (None, 1.0)
    assert (end.reason, end.turns, end.summaries) == ("completed", 5, 1)
    assert recorded(policy) == requested_prompts(policy)
    parents = [turn.parent for turn in policy.turns]
    assert parents[:2] == [None, 0]
    assert parents[3] is None  # the questions
    assert parents[5:] == [None, 5, 6]


def test_a_failed_summary_ends_the_agent_without_an_invented_reply(task: Path) -> None:
    (task / "tests" / "test.sh").write_text(PATIENT_TEST)
    sampler = Faulty([make_reply(DO, analysis="b" * 1500), SUMMARY[0]], failing=range(2, 9))
    policy = recording(sampler, limits=Limits(context_tokens=20_000))
    options = {"enable_summarize": True, "proactive_summarization_threshold": 15_500}
    result, end = asyncio.run(play(task, policy, **options))
    assert (reward(result), end.reason, end.summaries, len(policy.turns)) == (1.0, "service_error", 0, 2)


def test_a_first_prompt_that_fills_the_context_overflows_despite_summaries(task: Path) -> None:
    policy = ScriptedPolicy([], limits=Limits(context_tokens=1000))
    result, end = asyncio.run(play(task, policy, enable_summarize=True))
    assert (result.exception_info, reward(result), end.reason, end.turns) == (None, 0.0, "overflow", 0)


def test_a_time_limit_keeps_the_finished_turns(task: Path, agent_time: AgentTime) -> None:
    (task / "tests" / "test.sh").write_text(PATIENT_TEST)
    policy = recording(Faulty([make_reply(DO)], hanging=1, on_hang=agent_time.end))
    result, end = asyncio.run(play(task, policy, timeout_s=agent_time.limit_s))
    assert result.exception_info.exception_type == "AgentTimeoutError"
    assert (reward(result), end.reason, end.turns, len(policy.turns)) == (1.0, "cancelled", 1, 1)
    assert (task.parent / "trials" / result.trial_name / "agent" / "trajectory.json").exists()


def test_max_turns_ends_the_agent_and_the_verifier_runs(task: Path) -> None:
    (task / "tests" / "test.sh").write_text(PATIENT_TEST)
    by_agent, end = asyncio.run(play(task, ScriptedPolicy(lambda prompt: make_reply(DO)), max_turns=2))
    assert (reward(by_agent), end.reason, end.turns) == (1.0, "max_turns", 2)
    policy = ScriptedPolicy(lambda prompt: make_reply(DO), limits=Limits(max_turns=2))
    by_run, end = asyncio.run(play(task, policy))
    assert (by_run.exception_info, reward(by_run), end.reason, end.turns) == (None, 1.0, "max_turns", 2)


def test_steps_of_a_task_are_separate_conversations_and_end_together(task: Path) -> None:
    steps = '\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    (task / "task.toml").write_text((task / "task.toml").read_text() + steps)
    for name in ("one", "two"):
        (task / "steps" / name / "tests").mkdir(parents=True)
        (task / "steps" / name / "instruction.md").write_text(f"Do {name}.")
        (task / "steps" / name / "tests" / "test.sh").write_text((task / "tests" / "test.sh").read_text())
    shutil.rmtree(task / "tests")
    policy = ScriptedPolicy([make_reply("ls\n"), make_reply("ls\n"), make_reply(DO), *DONE])
    result, end = asyncio.run(play(task, policy, max_turns=3))
    assert [result_of_step.verifier_result.rewards["reward"] for result_of_step in result.step_results] == [1.0, 1.0]
    assert (end.reason, end.turns) == ("max_turns", 5)


def test_empty_replies_keep_turns_aligned(task: Path) -> None:
    policy = ScriptedPolicy(["", make_reply(DO), "", *DONE])
    result, end = asyncio.run(play(task, policy))
    assert (reward(result), end.turns, end.parse_errors) == (1.0, 5, 2)
    assert [len(turn.completion) for turn in policy.turns][::2][:2] == [1, 1]
    assert [turn.parent for turn in policy.turns] == [None, 0, 1, 2, 3]
    assert recorded(policy) == requested_prompts(policy)


ODD = [
    "[" * 100_000,
    '{"analysis": "a", "plan": "b", "commands": ' + "[" * 5000,
    make_reply("\ud800\x00echo\n"),
    '{"analysis": 1, "plan": [], "commands": [{"keystrokes": "x", "duration": NaN}]}',
    '{"analysis": "\\ud800", "plan": "", "commands": [{"keystrokes": "\\ud800", "\\ud800": 1, "duration": 0}]}',
    '{"commands": 3, "task_complete": "perhaps"}',
    "<tool_call>{}</tool_call>",
]


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Harbor logs what is no text, and what runs tests in parallel cannot send that."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
def test_any_reply_is_answered(task: Path) -> None:
    policy = ScriptedPolicy([*ODD, make_reply("C-c", "clear\n", DO), *DONE])
    result, end = asyncio.run(play(task, policy))
    assert (result.exception_info, end.reason, end.turns) == (None, "completed", len(ODD) + 3)
    assert reward(result) == 1.0
    assert end.parse_errors >= 3


def test_a_model_that_exits_its_terminal_ends_the_agent(task: Path) -> None:
    policy = ScriptedPolicy([make_reply(DO, "exit\n", "ls\n", duration=0.3)])
    result, end = asyncio.run(play(task, policy))
    assert (result.exception_info, reward(result), end.reason) == (None, 1.0, "completed")
    assert "session ended" in end.detail


def test_an_error_in_the_agents_code_is_reported_and_the_verifier_runs(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkit.envs.harbor.agents.terminus import PolicyTerminus2

    def broken(self: object, terminal_output: str) -> str:
        raise KeyError("broken")

    monkeypatch.setattr(PolicyTerminus2, "_get_completion_confirmation_message", broken)
    result, end = asyncio.run(play(task, ScriptedPolicy([make_reply(DO), *DONE])))
    assert (result.exception_info, reward(result), end.reason) == (None, 1.0, "agent_error")
    assert end.detail == "KeyError: 'broken'"


def test_harbor_reports_an_error_of_the_environment(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit.envs.harbor.sandbox import LocalSandbox

    whole_exec = LocalSandbox.exec

    async def fail_on_keys(self: LocalSandbox, command: str, *args: object, **kwargs: object) -> object:
        if "send-keys" in command:
            raise ConnectionError("the machine is gone")
        return await whole_exec(self, command, *args, **kwargs)

    monkeypatch.setattr(LocalSandbox, "exec", fail_on_keys)
    result, end = asyncio.run(play(task, ScriptedPolicy([make_reply(DO), *DONE])))
    assert (result.exception_info.exception_type, reward(result)) == ("EnvironmentDown", None)
    assert (end.reason, end.detail) == (
        "agent_error",
        "the environment failed: ConnectionError: the machine is gone",
    )


def test_the_folder_of_a_trial_is_small(task: Path) -> None:
    policy = ScriptedPolicy([*(make_reply("echo x\n") for _ in range(6)), *DONE])
    result, _ = asyncio.run(play(task, policy))
    folder = task.parent / "trials" / result.trial_name
    assert (folder / "result.json").stat().st_size < 5000
    trajectory = json.loads((folder / "agent" / "trajectory.json").read_text())
    assert len(trajectory["steps"]) == 9
    assert not any("token_ids" in key for step in trajectory["steps"] for key in step.get("metrics") or {})
    assert not list(folder.rglob("*.cast"))
    asked_for = sum(len(tokens) for tokens in requested_prompts(policy))
    assert trajectory["final_metrics"]["total_prompt_tokens"] == asked_for


def test_links_planted_in_place_of_records_overwrite_nothing(task: Path, tmp_path: Path) -> None:
    host_file = tmp_path / "held"
    host_file.write_text("the host's")
    names = ["trajectory.json", *(f"trajectory.summarization-1-{part}.json" for part in ("summary", "questions"))]
    links = "".join(f"ln -s {host_file} /logs/agent/{name}\n" for name in names)
    policy = ScriptedPolicy(
        [make_reply(links, DO, duration=0.5, analysis="b" * 1500), *SUMMARY, *DONE],
        limits=Limits(context_tokens=20_000),
        max_tokens=4000,
    )
    options = {"enable_summarize": True, "proactive_summarization_threshold": 15_000}
    mounted = "tests.envs.harbor.environments:Mounted"
    result, end = asyncio.run(play(task, policy, environment=mounted, **options))
    assert (result.exception_info, reward(result), end.summaries) == (None, 1.0, 1)
    folder = task.parent / "trials" / result.trial_name / "agent"
    assert host_file.read_text() == "the host's"
    assert [(folder / name).is_symlink() for name in names] == [False] * 3
    assert len(json.loads((folder / "trajectory.json").read_text())["steps"]) > 3


RECORDER = """#!/bin/sh
[ "$1" = rec ] || exit 0
sleep 1.5
python3 -c 'import termios; termios.tcflush(0, termios.TCIFLUSH)'
printf 'about\nfirst\n' > "$3"
exec bash
"""


def test_a_recorder_that_starts_slowly_swallows_no_keystrokes(task: Path) -> None:
    # As asciinema does on a busy machine, which drops what is typed before it records.
    (task / "environment" / "asciinema").write_text(RECORDER)
    dockerfile = (task / "environment" / "Dockerfile").read_text()
    copied = "COPY asciinema /usr/local/bin/asciinema\nRUN chmod 755 /usr/local/bin/asciinema\n"
    (task / "environment" / "Dockerfile").write_text(dockerfile + copied)
    result, end = asyncio.run(play(task, ScriptedPolicy([make_reply(DO), *DONE]), record_terminal_session=True))
    assert (result.exception_info, reward(result), end.reason) == (None, 1.0, "completed")
    assert (task.parent / "trials" / result.trial_name / "agent" / "recording.cast").exists()


def test_unknown_or_ineffective_options_are_one_line_errors(task: Path) -> None:
    for options, message in [
        ({"parser": "xml"}, "agent options.parser: unknown. Did you mean 'parser_name'"),
        ({"api_base": "http://x"}, "agent options.api_base: has no effect with a policy"),
        ({"max_turns": "many"}, "agent options.max_turns: Input should be a valid integer"),
        ({"parser_name": "yaml"}, "agent options: parser_name is 'yaml'; set json or xml"),
    ]:
        with pytest.raises(UsageError, match=message):
            asyncio.run(play(task, ScriptedPolicy([]), **options))


def test_an_agent_needs_a_policy_that_is_set(task: Path) -> None:
    from rlkit.envs.harbor.agents.terminus import PolicyTerminus2

    agent = PolicyTerminus2(task)
    assert (agent.end.reason, agent.end.detail) == ("cancelled", "the agent was not started")
    with pytest.raises(UsageError, match=r"the agent has no policy: set `trial\.agent\.policy` before"):
        _ = agent.policy
