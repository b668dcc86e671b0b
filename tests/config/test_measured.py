"""Metrics that a run may have even if its dry run has none."""

from __future__ import annotations

from rlkit.config.schema import Config
from rlkit.metrics.metrics import has_by_chance

CONFIG = Config.model_validate(
    {
        "envs": {"few": {"group_size": 4}, "many": {"group_size": 12, "advantage": "entropic_adaptive"}},
        "eval": {"envs": {"held_out": {"attempts": 8}}},
    }
)


def test_pass_at_k_exists_for_powers_of_two_up_to_the_group_size() -> None:
    def list_k(env: str) -> list[int]:
        return [k for k in range(20) if has_by_chance(f"env/{env}/pass_at_{k}", CONFIG)]

    assert list_k("few") == [2, 4]
    assert list_k("many") == list_k("all") == [2, 4, 8]
    assert not has_by_chance("env/few/pass_at_", CONFIG)


def test_saturation_is_a_metric_of_searching_estimators_only() -> None:
    assert [has_by_chance(f"env/{env}/advantage/saturated", CONFIG) for env in ("few", "many", "all")] == [
        False, True, True
    ]  # fmt: skip


def test_an_evaluation_is_played_with_all_its_attempts_and_only_repeats_are_chance() -> None:
    assert has_by_chance("eval/held_out/retried/gap", CONFIG)
    for name in ("pass_at_8", "advantage/saturated", "reward/mean"):
        assert not has_by_chance(f"eval/held_out/{name}", CONFIG)
