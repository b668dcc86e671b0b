from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.harbor.outcome import CAUSES, Cause, Report, Reward, Rule, Rules, make_outcome
from rlkit.errors import EnvironmentFault, MissingError, RlkitError, ServiceError, UsageError
from rlkit.types import Outcome

RULES: tuple[Rule, ...] = ("verify", "zero", "mask", "drop")
rules = st.sampled_from(RULES)


def judged(report: Report, rules: Rules | None = None, reward: Reward | None = None) -> Outcome:
    return make_outcome(report, rules or Rules(), reward or Reward())


def rule(cause: Cause, rule: Rule) -> Rules:
    return Rules(**{cause: rule})  # type: ignore[arg-type]  one of them by its name


def test_what_the_verifier_says_is_the_reward() -> None:
    done = judged(Report({"reward": 0.25}, metrics={"agent_turns": 3.0}))
    assert (done.reward, done.truncated, done.masked) == (0.25, False, False)
    assert done.metrics == {"agent_turns": 3.0, "rewards/reward": 0.25, **dict.fromkeys(CAUSES, 0.0)}


@pytest.mark.parametrize(
    ("cause", "reward", "masked"), [("verify", 1.0, False), ("zero", 0.0, False), ("mask", 1.0, True)]
)
def test_the_rule_decides_what_a_trial_that_ran_out_of_time_is_worth(cause: Rule, reward: float, masked: bool) -> None:
    done = judged(Report({"reward": 1.0}, "timeout", truncated=True), rule("timeout", cause))
    assert (done.reward, done.masked, done.truncated) == (reward, masked, True)
    assert done.metrics["timeout"] == 1.0


@pytest.mark.parametrize("cause", ["agent_error", "environment_error", "verifier_error"])
def test_what_broke_beside_the_model_is_dropped_unless_the_rules_say_otherwise(cause: Cause) -> None:
    report = Report({"reward": 1.0}, cause, detail="the sandbox died", error="EnvironmentFault")
    with pytest.raises(EnvironmentFault, match=f"^{cause}: EnvironmentFault: the sandbox died$"):
        judged(report)
    named: Cause = "environment_error" if cause == "verifier_error" else cause
    assert judged(report, rule(named, "verify")).reward == 1.0


def test_an_error_of_the_environment_is_never_reward_0() -> None:
    with pytest.raises(UsageError, match=r"^on_environment_error: zero would punish"):
        Rules(environment_error="zero")


@pytest.mark.parametrize("said", ["verify", "mask", "drop"])
def test_without_a_word_of_the_verifier_there_is_no_reward(said: Rule) -> None:
    with pytest.raises(EnvironmentFault, match=r"^overflow: "):
        judged(Report(None, "overflow"), rule("overflow", said))


def test_an_error_of_the_service_is_the_services() -> None:
    report = Report({"reward": 1.0}, "service_error", detail="the service answered 500")
    with pytest.raises(ServiceError, match="answered 500"):
        judged(report)
    assert judged(report, rule("environment_error", "verify")).reward == 1.0


@pytest.mark.parametrize(("error", "raised"), [("MissingError", MissingError), ("ConfigError", UsageError)])
@pytest.mark.parametrize("said", ["verify", "mask", "drop"])
def test_what_no_repetition_can_mend_ends_the_run_whatever_the_rules_say(
    error: str, raised: type[RlkitError], said: Rule
) -> None:
    report = Report({"reward": 1.0}, "environment_error", detail="no namespaces", error=error)
    with pytest.raises(raised, match=r"^no namespaces$"):
        judged(report, rule("environment_error", said))


def test_a_number_that_is_too_large_is_no_reward() -> None:
    for rewards in ({"reward": 10**400}, {"reward": 1, "tests": 10**400}):
        with pytest.raises(EnvironmentFault, match=r"^verifier_error: .* too large$"):
            judged(Report(rewards))


@given(
    st.sampled_from([None, *CAUSES, "service_error"]),
    st.none() | st.floats(-5, 5),
    rules,
    rules,
    rules,
    st.sampled_from(["verify", "mask", "drop"]),
)
def test_a_reward_is_the_verifiers_or_a_zero_that_was_asked_for(
    cause: Cause | None, said: float | None, timeout: Rule, overflow: Rule, agent_error: Rule, environment_error: Rule
) -> None:
    chosen = Rules(timeout, overflow, agent_error, environment_error)
    report = Report(None if said is None else {"reward": said}, cause)
    try:
        done = judged(report, chosen)
    except RlkitError:
        assert said is None or chosen.get_rule(cause) == "drop"
        return
    assert done.reward == (0.0 if chosen.get_rule(cause) == "zero" else said)
    assert done.masked == (chosen.get_rule(cause) == "mask")


def test_of_several_numbers_one_is_named_or_all_are_weighed() -> None:
    rewards = {"tests": 0.5, "style": 1.0}
    assert Reward().compute({"tests": 0.5}) == 0.5
    assert Reward().compute({"reward": 0.75, **rewards}) == 0.75
    assert Reward("style").compute(rewards) == 1.0
    assert Reward(weights={"tests": 2.0, "style": -0.5}).compute(rewards) == 0.5
    with pytest.raises(EnvironmentFault, match=r"no reward 'reward' but style, tests\..*reward_key"):
        Reward().compute(rewards)
    with pytest.raises(EnvironmentFault, match=r"no reward 'stile' but style, tests\. Did you mean 'style'"):
        Reward("stile").compute(rewards)
    with pytest.raises(UsageError, match=r"^reward_weights\.style: nan is no weight"):
        Reward(weights={"tests": 1.0, "style": float("nan")})
    with pytest.raises(UsageError, match="reward_key and reward_weights"):
        Reward("tests", {"style": 1.0})
