"""Each trained token has its advantage and the trainer's log-probability in the record of its step."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlkit.algorithms.advantages import as_estimator
from rlkit.algorithms.datums import Preparation, PreparedGroup, UpdateResult
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.algorithms.losses import PPO
from rlkit.errors import UsageError
from rlkit.token_records.updates import place_numbers, read_update, update_path, write_update
from rlkit.tools.audit import audit, audit_group
from rlkit.types import Group
from tests.builders import episode, group, turn
from tests.simulation import Simulation, Talk

FORKED = (
    turn([1, 2, 3], [4, 5], forced=1),
    turn([6], [7], parent=0),
    turn([8, 9], [10, 11, 12], parent=0),
    turn([13], [14]),
)


def prepare(played: Group, estimator: str | Estimator = "grpo", *, max_tokens: int | None = None) -> PreparedGroup:
    chosen = ESTIMATORS[estimator]() if isinstance(estimator, str) else estimator
    return asyncio.run(Preparation({played.env: chosen}, max_tokens=max_tokens).prepare(played))


def trained(*groups: PreparedGroup) -> UpdateResult:
    """A trainer whose log-probability of a token is −(token + its sequence / 100)."""
    data = [datum for prepared in groups for datum in prepared.data]
    rows = [-(datum.targets + number / 100).astype(np.float32) for number, datum in enumerate(data)]
    return UpdateResult(groups, rows, {}, PPO(), 1e-4)


def written(path: Path, groups: list[PreparedGroup], result: UpdateResult | None):
    write_update(update_path(path, 3), 3, groups, result, estimators={"env": "grpo"})
    return read_update(update_path(path, 3))


def test_each_trained_token_has_its_numbers(tmp_path: Path) -> None:
    episodes = (episode(1.0, turns=FORKED), episode(0.0, member=1), episode(None, member=2))
    prepared, equal = prepare(Group("env", "t", 4, episodes)), prepare(group([1.0, 1.0], draw=5))
    recorded = written(tmp_path, [equal, prepared], trained(prepared))
    assert (recorded[5].sequences, recorded[5].baseline, recorded[5].estimator) == ([], 1.0, "grpo")
    assert recorded[4].baseline == pytest.approx(0.5)
    for number, (sequence, datum) in enumerate(zip(recorded[4].sequences, prepared.data, strict=True)):
        assert sequence.position == number
        assert sequence.mask.tolist() == datum.mask.tolist()
        assert sequence.advantages.tolist() == datum.advantages[datum.mask].tolist()
        expected = -(datum.targets[datum.mask] + number / 100).astype(np.float32)
        assert sequence.find_logprobs(datum.logprobs[datum.mask]).tolist() == expected.tolist()
    places = [(sequence.member, sequence.turn) for sequence in recorded[4].sequences]
    assert places == [(0, 1), (0, 2), (0, 3), (1, 0)]
    assert asyncio.run(audit_group(prepared.group, recorded=recorded[4])).mismatch is None


@pytest.mark.parametrize(("penalty", "gap", "limit"), [(0.0, 1e-2, 3.0), (0.05, 1e-5, 5.4), (0.05, 1e-3, 6.0)])
def test_a_token_takes_at_most_six_bytes_also_if_all_advantages_differ(
    penalty: float, gap: float, limit: float, tmp_path: Path
) -> None:
    rng, size = np.random.default_rng(0), 1000
    turns = [
        replace(
            turn([1, 2], rng.integers(0, 1000, size).tolist()),
            logprobs=-rng.exponential(0.3, size).astype(np.float32),
        )
        for _ in range(32)
    ]
    played = Group("env", "t", 4, tuple(episode(n % 3, member=n, turns=(each,)) for n, each in enumerate(turns)))
    prepared = prepare(played)
    rows = [datum.logprobs * rng.normal(1, gap, size + 1).astype(np.float32) for datum in prepared.data]
    data = [
        replace(datum, advantages=(datum.advantages - penalty * rng.normal(0, 0.1, size + 1)).astype(np.float32))
        for datum in prepared.data
    ]
    prepared = replace(prepared, data=tuple(data))
    written(tmp_path, [prepared], UpdateResult([prepared], rows, {}, PPO(), 1e-4))
    assert update_path(tmp_path, 3).stat().st_size < limit * 32 * size


@pytest.mark.parametrize("sampled", [-0.25, -1e-30, -0.0, 0.0, -np.inf, np.nan])
def test_each_float_is_recorded_exactly(tmp_path: Path, sampled: float) -> None:
    own = replace(turn([1, 2], list(range(1000))), logprobs=np.full(1000, sampled, np.float32))
    prepared = prepare(Group("env", "t", 4, (episode(1.0, turns=(own,)), episode(0.0, member=1, turns=(own,)))))
    logprobs = np.random.default_rng(0).integers(-(2**31), 2**31, 1001, np.int32)
    logprobs[:7] = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -0.25, -0.1], np.float32).view(np.int32)
    result = UpdateResult([prepared], [logprobs.view(np.float32)] * len(prepared.data), {}, PPO(), 1e-4)
    sequence, datum = written(tmp_path, [prepared], result)[4].sequences[0], prepared.data[0]
    found = sequence.find_logprobs(datum.logprobs[datum.mask]).view(np.int32)
    assert found.tolist() == logprobs[datum.mask].tolist()


def test_a_table_of_an_earlier_release_has_the_log_probabilities_themselves(tmp_path: Path) -> None:
    prepared = prepare(Group("env", "t", 4, (episode(1.0, turns=FORKED), episode(0.0, member=1))))
    sequences = written(tmp_path, [prepared], trained(prepared))[4].sequences
    sampled = [datum.logprobs[datum.mask] for datum in prepared.data]
    expected = [each.find_logprobs(row).tolist() for each, row in zip(sequences, sampled, strict=True)]
    table = pq.read_table(update_path(tmp_path, 3))
    rows = table["sequences"].to_pylist()
    for row, logprobs in zip(rows[0], expected, strict=True):
        row["logprobs"] = logprobs
        del row["logprob_bits"]
    fields = [*list(table.schema.field("sequences").type.value_type)[:-1], pa.field("logprobs", pa.list_(pa.float32()))]
    column = pa.array(rows, pa.list_(pa.struct(fields)))
    pq.write_table(table.set_column(6, "sequences", column), update_path(tmp_path, 3))
    recorded = read_update(update_path(tmp_path, 3))[4]
    earlier = [each.find_logprobs(row).tolist() for each, row in zip(recorded.sequences, sampled, strict=True)]
    assert earlier == expected
    assert asyncio.run(audit_group(prepared.group, recorded=recorded)).mismatch is None


def test_a_step_that_trains_on_nothing_is_recorded(tmp_path: Path) -> None:
    equal = prepare(group([0.5, 0.5], draw=7))
    assert written(tmp_path, [equal], None)[7].sequences == []
    assert written(tmp_path, [], None) == {}
    assert read_update(update_path(tmp_path, 4)) == {}


@pytest.mark.parametrize("damage", ["mask", "place", "count", "advantage", "logprob"])
def test_the_audit_finds_a_record_of_other_tokens(tmp_path: Path, damage: str) -> None:
    prepared = prepare(Group("env", "t", 4, (episode(1.0, turns=FORKED), episode(0.0, member=1))))
    recorded = written(tmp_path, [prepared], trained(prepared))[4]
    first, datum = recorded.sequences[0], prepared.data[0]
    infinite_bits = datum.logprobs[datum.mask].view(np.int32) ^ np.float32(np.inf).view(np.int32)
    wrong = {
        "mask": replace(first, mask=~first.mask),
        "place": replace(first, member=1),
        "count": replace(first, logprob_bits=first.logprob_bits[1:]),
        "advantage": replace(first, advantages=first.advantages * np.float32(np.nan)),
        "logprob": replace(first, logprob_bits=infinite_bits),
    }[damage]
    recorded = replace(recorded, sequences=[wrong, *recorded.sequences[1:]])
    mismatch = asyncio.run(audit_group(prepared.group, recorded=recorded)).mismatch
    assert mismatch is not None
    assert mismatch.startswith(f"the recorded sequence of member {wrong.member} up to turn {wrong.turn}")


def test_sequences_of_a_limited_batch_are_recorded_as_they_were_cut(tmp_path: Path) -> None:
    prepared = prepare(Group("env", "t", 4, (episode(1.0, turns=FORKED), episode(0.0, member=1))), max_tokens=6)
    recorded = written(tmp_path, [prepared], trained(prepared))[4]
    assert asyncio.run(audit_group(prepared.group, max_tokens=6, recorded=recorded)).mismatch is None


@pytest.mark.parametrize(
    ("estimator", "baseline"),
    [
        ("group_mean", 0.375),
        ("grpo", 0.375),
        ("rloo", 0.375),
        ("maxrl", 0.375),
        ("opo", 0.375),
        ("median_mad", 0.25),
        ("quantile", 0.0),
        ("rank", None),
        ("best_vs_second", None),
    ],
)
def test_the_baseline_is_the_reward_whose_advantage_is_zero(
    tmp_path: Path, estimator: str, baseline: float | None
) -> None:
    prepared = prepare(group([0.0, 0.0, 0.5, 1.0], draw=4), estimator)
    assert written(tmp_path, [prepared], trained(prepared))[4].baseline == pytest.approx(baseline)


def test_advantages_that_differ_between_turns_have_no_baseline(tmp_path: Path) -> None:
    estimator = as_estimator(lambda played: [np.arange(len(e.turns), dtype=float) for e in played.episodes])
    prepared = prepare(Group("env", "t", 4, (episode(1.0, turns=FORKED), episode(0.0, member=1))), estimator)
    assert written(tmp_path, [prepared], trained(prepared))[4].baseline is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = update_path(tmp_path, 1)
    path.parent.mkdir()
    path.write_bytes(b"PAR1 but no table PAR1")
    with pytest.raises(UsageError, match=r"000001\.parquet is damaged"):
        read_update(path)


def test_a_changed_byte_of_the_footer_raises_no_other_error(tmp_path: Path) -> None:
    prepared = prepare(Group("env", "t", 4, (episode(1.0, turns=FORKED), episode(0.0, member=1))))
    written(tmp_path, [prepared], trained(prepared))
    path, noticed = update_path(tmp_path, 3), 0
    content = path.read_bytes()
    for place in range(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            read_update(path)
        except UsageError as error:
            assert str(error).startswith(f"{path} is damaged: ")
            noticed += 1
    assert noticed


@pytest.mark.parametrize("name", ["advantages", "logprob_bits"])
def test_a_changed_number_is_noticed(tmp_path: Path, name: str) -> None:
    prepared = prepare(Group("env", "t", 4, (episode(1.0, turns=FORKED), episode(0.0, member=1))))
    written(tmp_path, [prepared], trained(prepared))
    path = update_path(tmp_path, 3)
    content, columns = path.read_bytes(), pq.ParquetFile(path).metadata.row_group(0)
    column = next(c for c in map(columns.column, range(columns.num_columns)) if name in c.path_in_schema)
    end = column.data_page_offset + column.total_compressed_size
    for place in range(end - 8, end):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UsageError, match=r"000003\.parquet is damaged"):
            read_update(path)


@pytest.mark.parametrize("schedule", [{"mode": "sync"}, {"mode": "stream"}, {"mode": "async", "max_staleness": 2}])
def test_a_run_records_each_step_also_when_it_is_resumed(tmp_path: Path, schedule: dict[str, object]) -> None:
    settings = {"schedule": schedule, "steps": 5, "batch": {"groups": 3, "substeps": 1}}
    run = Simulation(tmp_path / "run", settings=settings, tasks=[Talk(number) for number in range(40)])
    run.train_until(40.0)
    run.train(resume=True)
    assert all(result.mismatch is None for result in asyncio.run(audit(run.directory)).values())
    for line in run.lines():
        groups = read_update(update_path(run.directory, line["step"])).values()
        sequences = [sequence for recorded in groups for sequence in recorded.sequences]
        assert len(sequences) == line.get("optim/sequences", 0)
        assert sum(map(len, (sequence.logprob_bits for sequence in sequences))) == line.get("optim/tokens", 0)
        assert sorted(sequence.position for sequence in sequences) == list(range(len(sequences)))


def test_the_audit_finds_the_record_of_another_step(tmp_path: Path) -> None:
    settings = {"steps": 2, "batch": {"groups": 3, "substeps": 1}}
    run = Simulation(tmp_path / "run", settings=settings, tasks=[Talk(number) for number in range(40)])
    run.train()
    shutil.copy(update_path(run.directory, 2), update_path(run.directory, 1))
    (result,) = asyncio.run(audit(run.directory)).values()
    assert result.mismatch is not None
    assert result.mismatch.startswith("step 1, ")
    assert result.mismatch.endswith("of the recorded update is no group of the step")


def test_the_numbers_of_a_sequence_are_placed_on_its_turns(tmp_path: Path) -> None:
    played = tuple(episode(reward, member=member, turns=FORKED) for member, reward in enumerate((1.0, 0.0)))
    prepared = prepare(Group("env", "task", 0, played))
    (update,) = written(tmp_path, [prepared], trained(prepared)).values()
    names = ("completion", "logprobs", "parent")
    rows = [{"prompt": turn.prompt.tokens, **{name: getattr(turn, name) for name in names}} for turn in FORKED]
    for member, sign in ((0, 1), (1, -1)):
        sequences = [sequence for sequence in update.sequences if sequence.member == member]
        placed = place_numbers(sequences, rows)
        for index, (position, numbers) in placed.items():
            assert position in {sequence.position for sequence in sequences}
            is_trained = FORKED[index].sampled_mask
            assert np.isnan(numbers[:, ~is_trained]).all()
            assert (np.sign(numbers[0, is_trained]) == sign).all()
            expected = -(FORKED[index].completion[is_trained] + position / 100)
            assert numbers[1, is_trained] == pytest.approx(expected, abs=1e-5)
        assert set(placed) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="turn 1 continues turn 2"):
        place_numbers([replace(update.sequences[0], turn=1)], [rows[0], {**rows[1], "parent": 2}, rows[2]])
