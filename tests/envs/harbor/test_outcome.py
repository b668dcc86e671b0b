from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.harbor.outcome import CAUSES, Cause, Report, Reward, Rule, Rules, make_outcome
from rlkit.errors import EnvironmentFault, MissingError, RlkitError, ServiceError, UsageError
from rlkit.types import Outcome

RULES: tuple[Rule, ...] = ("verify", "zero", "mask", "drop")
rules = st.sampled_from(RULES)


def judge_report(report: Report, rules: Rules | None = None, reward: Reward | None = None) -> Outcome:
    return make_outcome(report, rules or Rules(), reward or Reward())


def rule(cause: Cause, rule: Rule) -> Rules:
    return Rules(**{cause: rule})  # type: ignore[arg-type]  one of them by its name


def test_the_verifiers_reward_is_the_reward() -> None:
    done = judge_report(Report({"reward": 0.25}, metrics={"agent_turns": 3.0}))
    assert (done.reward, done.truncated, done.masked) == (0.25, False, False)
    assert done.metrics == {"agent_turns": 3.0, "rewards/reward": 0.25, **dict.fromkeys(CAUSES, 0.0)}


@pytest.mark.parametrize(
    ("cause", "reward", "masked"), [("verify", 1.0, False), ("zero", 0.0, False), ("mask", 1.0, True)]
)
def test_the_timeout_rule_decides_the_outcome_of_a_timed_out_trial(cause: Rule, reward: float, masked: bool) -> None:
    done = judge_report(Report({"reward": 1.0}, "timeout", truncated=True), rule("timeout", cause))
    assert (done.reward, done.masked, done.truncated) == (reward, masked, True)
    assert done.metrics["timeout"] == 1.0


@pytest.mark.parametrize("cause", ["agent_error", "environment_error", "verifier_error"])
def test_faults_outside_the_model_are_dropped_by_default(cause: Cause) -> None:
    report = Report({"reward": 1.0}, cause, detail="the sandbox died", error="EnvironmentFault")
    with pytest.raises(EnvironmentFault, match=f"^{cause}: EnvironmentFault: the sandbox died$"):
        judge_report(report)
    named: Cause = "environment_error" if cause == "verifier_error" else cause
    assert judge_report(report, rule(named, "verify")).reward == 1.0


def test_an_environment_error_never_has_reward_0() -> None:
    with pytest.raises(UsageError, match=r"^on_environment_error: zero would punish"):
        Rules(environment_error="zero")


@pytest.mark.parametrize("overflow_rule", ["verify", "mask", "drop"])
def test_without_a_verifier_reward_there_is_no_reward(overflow_rule: Rule) -> None:
    with pytest.raises(EnvironmentFault, match=r"^overflow: "):
        judge_report(Report(None, "overflow"), rule("overflow", overflow_rule))


def test_a_service_error_is_raised_as_such() -> None:
    report = Report({"reward": 1.0}, "service_error", detail="the service answered 500")
    with pytest.raises(ServiceError, match="answered 500"):
        judge_report(report)
    assert judge_report(report, rule("environment_error", "verify")).reward == 1.0


@pytest.mark.parametrize(("error", "raised"), [("MissingError", MissingError), ("ConfigError", UsageError)])
@pytest.mark.parametrize("error_rule", ["verify", "mask", "drop"])
def test_permanent_errors_end_the_run_for_any_rules(error: str, raised: type[RlkitError], error_rule: Rule) -> None:
    report = Report({"reward": 1.0}, "environment_error", detail="no namespaces", error=error)
    with pytest.raises(raised, match=r"^no namespaces$"):
        judge_report(report, rule("environment_error", error_rule))


def test_a_number_that_is_too_large_is_rejected_as_reward() -> None:
    for rewards in ({"reward": 10**400}, {"reward": 1, "tests": 10**400}):
        with pytest.raises(EnvironmentFault, match=r"^verifier_error: .* too large$"):
            judge_report(Report(rewards))


@given(
    st.sampled_from([None, *CAUSES, "service_error"]),
    st.none() | st.floats(-5, 5),
    rules,
    rules,
    rules,
    st.sampled_from(["verify", "mask", "drop"]),
)
def test_a_reward_is_the_verifiers_or_a_configured_zero(
    cause: Cause | None,
    verifier_reward: float | None,
    timeout: Rule,
    overflow: Rule,
    agent_error: Rule,
    environment_error: Rule,
) -> None:
    chosen_rules = Rules(timeout, overflow, agent_error, environment_error)
    report = Report(None if verifier_reward is None else {"reward": verifier_reward}, cause)
    try:
        outcome = judge_report(report, chosen_rules)
    except RlkitError:
        assert verifier_reward is None or chosen_rules.get_rule(cause) == "drop"
        return
    assert outcome.reward == (0.0 if chosen_rules.get_rule(cause) == "zero" else verifier_reward)
    assert outcome.masked == (chosen_rules.get_rule(cause) == "mask")


def test_several_rewards_need_a_key_or_weights() -> None:
    rewards = {"tests": 0.5, "style": 1.0}
    assert Reward().compute({"tests": 0.5}) == 0.5
    assert Reward().compute({"reward": 0.75, **rewards}) == 0.75
    assert Reward("style").compute(rewards) == 1.0
    assert Reward(weights={"tests": 2.0, "style": -0.5}).compute(rewards) == 0.5
    with pytest.raises(EnvironmentFault, match=r"no reward 'reward' but style, tests\..*reward_key"):
        Reward().compute(rewards)
    with pytest.raises(EnvironmentFault, match=r"no reward 'stile' but style, tests\. Did you mean 'style'"):
        Reward("stile").compute(rewards)
    with pytest.raises(UsageError, match=r"^reward_weights\.style: nan is not a weight"):
        Reward(weights={"tests": 1.0, "style": float("nan")})
    with pytest.raises(UsageError, match="reward_key and reward_weights"):
        Reward("tests", {"style": 1.0})
