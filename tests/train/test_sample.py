"""Dynamic sampling: groups without spread give way to others, a bounded number of times."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_jax.config import Config, MeshConfig, ModelConfig, RolloutConfig, TaskConfig
from grpo_jax.train import sample as sampling
from grpo_jax.train.sample import Sample, judge_rollout, replace_groups
from grpo_jax.train.session import Session, build_policy

P, G = 8, 4


class Judged(Session):
    """A session whose verdicts are scripted: ``spreads[n][p]``, whether group p of the n-th rollout has spread."""

    spreads: list[list[bool]]

    def judge(self, examples, completions):  # type: ignore[no-untyped-def]
        correct_PG = np.zeros((P, G), bool)
        correct_PG[:, 0] = self.spreads.pop(0)
        return correct_PG


def session(extra_rollouts: int) -> Judged:
    config = Config(
        model=ModelConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=1),
        task=TaskConfig(name="sort", num_train=64, num_heldout=8),
        rollout=RolloutConfig(
            num_prompts=P,
            group_size=G,
            max_prompt_length=8,
            max_completion_length=4,
            extra_rollouts=extra_rollouts,
        ),
        mesh=MeshConfig(data=4, group=2),
    )
    return Judged(build_policy(config))


@pytest.fixture(scope="module")
def judged() -> Judged:
    return session(extra_rollouts=2)


def draw(judged: Judged, key: jax.Array) -> Sample:
    examples = next(judged.prompts)
    rollout = judged.roll_out(judged.policy.params, examples, key)
    return judge_rollout(judged, examples, rollout, judged.policy.sampler.to_host(rollout))


def first_sample(judged: Judged) -> tuple[Sample, jax.Array]:
    key = jax.random.key(3)
    return draw(judged, key), key


def rows(sample: Sample) -> list[tuple[str, list[list[int]], list[list[int]], bool]]:
    """All that belongs to each group: prompt, ids on the device, ids on the host, verdict."""
    tokens, mask = np.asarray(sample.rollout.completion_PGT), np.asarray(sample.rollout.completion_mask_PGT)
    return [
        (
            str(sample.examples[p].prompt),
            [tokens[p, g][mask[p, g]].tolist() for g in range(G)],
            sample.completions.token_ids[p],
            bool(sample.correct_PG[p].any()),
        )
        for p in range(P)
    ]


def test_groups_without_spread_give_way_to_whole_groups_with_it(judged: Judged) -> None:
    without = [False] * P
    judged.spreads = [
        [True, False, True, False, False, True, True, True],
        [False, True, False, False, False, True, False, False],
        [*without[:6], True, False],
    ]
    sample, key = first_sample(judged)
    before = rows(sample)
    start = judged.prompts.position()["next_batch"]
    got, extra = replace_groups(judged, sample, functools.partial(draw, judged), key)
    assert extra == 2 and judged.prompts.position()["next_batch"] == start + 2
    after = rows(got)
    assert all(with_spread for *_, with_spread in after)
    for p in range(P):
        prompt, on_device, on_host, _ = after[p]
        assert on_device == on_host, "device and host took the same group"
        ids = np.asarray(got.rollout.prompt_PS)[p][np.asarray(got.rollout.prompt_mask_PS)[p]]
        assert judged.policy.tokenizer.decode(ids.tolist()) == prompt, "a group keeps its own prompt"
        assert (after[p] == before[p]) == before[p][3], "only groups without spread are replaced"
        assert got.completions.texts[p] == [judged.policy.tokenizer.decode(ids) for ids in on_host]
        np.testing.assert_array_equal(got.completions.lengths_PG[p], [len(ids) for ids in on_host])
    assert len({prompt for prompt, *_ in after}) == P, "new prompts are drawn"


def test_extra_rollouts_are_bounded_and_what_is_left_stays(judged: Judged) -> None:
    judged.spreads = [[False] * P for _ in range(3)]
    sample, key = first_sample(judged)
    got, extra = replace_groups(judged, sample, functools.partial(draw, judged), key)
    assert extra == 2 and judged.spreads == []
    assert rows(got) == rows(sample)


def test_no_rollout_is_drawn_where_none_is_needed(judged: Judged) -> None:
    judged.spreads = [[True] * P]
    sample, key = first_sample(judged)
    got, extra = replace_groups(judged, sample, functools.partial(draw, judged), key)
    assert extra == 0 and got is sample


def test_spread_is_read_from_the_verdict_or_from_the_rewards_before_any_shaping(judged: Judged) -> None:
    """Rewards that differ and verdicts that don't: with ``spread_of="rewards"`` the groups stay."""
    judged.spreads = [[False] * P]
    sample, _ = first_sample(judged)
    spread = np.zeros((P, G, len(judged.reward_names)), np.float32)
    spread[:5, 0] = 0.25
    sample = dataclasses.replace(sample, rewards=dataclasses.replace(sample.rewards, rewards_PGK=spread))
    assert sampling._without_spread(judged, sample).tolist() == [True] * P
    config = judged.config
    judged.config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, spread_of="rewards"))
    assert sampling._without_spread(judged, sample).tolist() == [False] * 5 + [True] * 3
    judged.config = config


@pytest.mark.slow
def test_a_run_with_dynamic_sampling_resumes_to_the_same_end(finished, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Extra prompts move the stream, and the checkpoint knows."""
    from tests.train.conftest import command
    from tests.train.test_loop import assert_equal_weights, timeless, weights

    options = ["--rollout.extra-rollouts", "1", "--objective.top-entropy", "0.5"]
    for folder, stops in (("whole", ["2"]), ("halves", ["1", "2"])):
        for steps in stops:
            run = ["train", finished.experiment, "--workdir", tmp_path / folder, "--train.steps", steps]
            ended = command(*run, *options)
            assert ended.status == 0, ended.err
    whole, halves = timeless(tmp_path / "whole"), timeless(tmp_path / "halves")
    for record in (*whole, *halves):  # a run evaluates after its last step
        for name in [name for name in record if "HeldOut" in name]:
            record.pop(name)
    assert whole == halves
    assert_equal_weights(weights(tmp_path / "whole", 2), weights(tmp_path / "halves", 2))
    assert whole[0]["Training/ExtraRollouts"] in (0, 1)
