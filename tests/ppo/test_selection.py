"""Tests of the selection of groups, of truncated responses and of length penalties."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megappo.algo.overlong import overlong_penalty
from megappo.config import load_config
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.observe.ends import End
from megappo.ppo.experience import ExperienceMaker
from megappo.ppo.rollout.selection import Selection, joined
from megappo.ppo.updates import critic_updates
from megappo.runtime.ranks.tally import Totals
from megappo.types import Episode, Episodes, Prompt, Rollouts, Scored
from tests.support.places import BASE

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("world_of_one")


def rollouts(names: str, lengths: list[int]) -> Rollouts:
    """Return one sample per letter with the given lengths. Token ids start at 100 times the index of the letter."""
    B, R = len(names), max(lengths)
    lengths_B = torch.tensor(lengths)
    mask_BR = torch.arange(R) < lengths_B[:, None]
    first_B = torch.tensor([100 * (ord(name) - ord("a")) for name in names])
    return Rollouts(
        prompts=tuple(Prompt(i, (1,), name, None, {}) for i, name in enumerate(names)), sample_ids_B=torch.arange(B),
        group_ids_B=torch.arange(B) // 2,
        sequences=tuple(torch.tensor([1, *range(int(f), int(f) + n)]) for f, n in zip(first_B, lengths, strict=True)),
        response_lengths_B=lengths_B,
        engine_logprob_BR=torch.where(mask_BR, -first_B[:, None] - torch.arange(R).float(), float("nan")),
        response_mask_BR=mask_BR, ends=tuple(End.RESPONSE_LIMIT if length == R else End.COMPLETE for length in lengths),
        weight_versions_B=first_B, responses=tuple(names), raw_responses=tuple(names.upper()),
        special_tokens_B=lengths_B,
    )  # fmt: skip


def selection(max_rounds: int = 3) -> Selection:
    return Selection(prompts=2, samples_per_prompt=2, max_rounds=max_rounds)


def of_rewards(**means: tuple[float, float]) -> Totals:
    """Return the metrics of a round: sum and count of each."""
    return Totals({f"reward/{name}": both for name, both in means.items()}, {}, {})


def check_names(selected: Rollouts, names: str) -> None:
    """Check that all fields of each sample belong to the same letter."""
    B, R = len(names), int(selected.response_lengths_B.max())
    firsts = [100 * (ord(name) - ord("a")) for name in names]
    assert selected.responses == tuple(names) and selected.raw_responses == tuple(names.upper())
    assert tuple(prompt.text for prompt in selected.prompts) == tuple(names)
    assert selected.weight_versions_B.tolist() == firsts and selected.sample_ids_B.tolist() == list(range(B))
    assert selected.engine_logprob_BR.shape == selected.response_mask_BR.shape == (B, R)
    for b, (first, length) in enumerate(zip(firsts, selected.response_lengths_B.tolist(), strict=True)):
        assert selected.sequences[b].tolist() == [1, *range(first, first + length)]
        assert selected.response_mask_BR[b].tolist() == [i < length for i in range(R)]
        assert selected.engine_logprob_BR[b, :length].tolist() == [-first - i for i in range(length)]


def test_groups_without_spread_are_replaced() -> None:
    chosen = selection()
    chosen.add(rollouts("abcd", [1, 2, 3, 1]), torch.tensor([1.0, 1.0, 0.0, 1.0]), of_rewards(failures=(0, 4)))
    assert (chosen.kept, chosen.wanted) == (1, 2)  # one group is missing; half of the groups are kept
    chosen.add(rollouts("efgh", [5, 1, 1, 1]), torch.tensor([0.5, 0.5, 0.25, 0.0]), of_rewards(failures=(2, 4)))
    assert chosen.wanted == 0
    selected, scores_B, metrics = chosen.finish()
    check_names(selected, "cdgh")
    assert scores_B.tolist() == [0.0, 1.0, 0.25, 0.0] and selected.group_ids_B.tolist() == [0, 0, 1, 1]
    assert metrics == {"group/spread": 0.5, "group/rounds": 2, "group/filled": 0, "reward/failures": 0.25}


def test_limited_rounds_still_fill_the_step() -> None:
    """If groups are missing after the last round, the first groups with equal rewards fill the step."""
    chosen, scores_B = selection(max_rounds=2), torch.zeros(4)
    chosen.add(rollouts("abcd", [1, 1, 1, 1]), scores_B, of_rewards())
    assert chosen.wanted == 2
    chosen.add(rollouts("efgh", [2, 2, 2, 2]), torch.tensor([0.0, 0.0, 0.0, 1.0]), of_rewards())
    assert chosen.wanted == 0
    selected, _, metrics = chosen.finish()
    check_names(selected, "abgh")
    assert metrics == {"group/spread": 0.25, "group/rounds": 2, "group/filled": 0.5}


def test_mean_over_rounds_is_weighted_by_graded_samples() -> None:
    """`rare` graded one sample of the first round (score 1) and nine samples of the second round (score 0). `other`
    graded no sample of the first round."""
    chosen = selection()
    first = of_rewards(rare=(1.0, 1), other=(0.0, 0), unreadable=(1.0, 2), never=(0.0, 0))
    chosen.add(rollouts("abcd", [1] * 4), torch.tensor([1.0, 1.0, 0.0, 1.0]), replace(first, maxima={"reward/s": 3.0}))
    second = of_rewards(rare=(0.0, 9), other=(4.5, 9), unreadable=(0.0, 18), never=(0.0, 0))
    chosen.add(rollouts("efgh", [1] * 4), torch.tensor([0.0, 1.0, 0.0, 1.0]), replace(second, maxima={"reward/s": 1.0}))
    metrics = chosen.finish()[2]
    rewards = {name: value for name, value in metrics.items() if name.startswith("reward/")}
    assert rewards == {"reward/rare": 0.1, "reward/other": 0.5, "reward/unreadable": 0.05, "reward/s": 3.0}


def test_round_without_equal_groups_is_unchanged() -> None:
    chosen, batch = selection(), rollouts("abcd", [3, 1, 2, 2])
    chosen.add(batch, torch.tensor([0.0, 1.0, 1.0, 0.0]), of_rewards())
    selected, _, metrics = chosen.finish()
    assert metrics == {"group/spread": 1.0, "group/rounds": 1.0, "group/filled": 0.0}
    for each in fields(batch):
        before, after = getattr(batch, each.name), getattr(selected, each.name)
        if isinstance(before, torch.Tensor):
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        elif each.name != "sequences":
            assert after == before


def test_failed_episodes_break_their_group() -> None:
    """A group with one remaining sample has no spread. Rewards of turns count for the spread and stay with their
    samples."""
    failed, fine = Episode((), failure="hung"), Episode(())
    rewards_BR = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.5, 0.0]])
    episodes = Episodes((fine, failed, fine, fine), rewards_BR, tuple(({"by": name},) for name in "abcd"))
    batch = replace(rollouts("abcd", [2, 2, 1, 1]), group_ids_B=torch.tensor([0, -2, 1, 1]), episodes=episodes)
    chosen = Selection(prompts=1, samples_per_prompt=2, max_rounds=2)
    chosen.add(batch, torch.zeros(4), of_rewards())
    selected, _, metrics = chosen.finish()
    check_names(selected, "cd")
    assert metrics["group/spread"] == 0.5 and selected.episodes is not None
    assert selected.episodes.turn_rewards_BR.tolist() == [[0.0], [0.5]]
    assert selected.episodes.of_samples == (fine, fine) and selected.episodes.conversations == (
        ({"by": "c"},),
        ({"by": "d"},),
    )
    only_failed = joined([(batch, [1]), (batch, [])])
    assert only_failed.group_ids_B.tolist() == [-2] and len(joined([(batch, [])]).responses) == 0


def test_overlong_penalty_grows_with_length() -> None:
    """The figures are from DAPO: a limit of 20,480 tokens, with a penalty in the last 4,096."""
    lengths_B = torch.tensor([1, 16384, 17408, 18432, 20480, 30000])
    penalties = overlong_penalty(lengths_B, most_tokens=20480, buffer_tokens=4096)
    assert penalties.tolist() == [0, 0, -0.25, -0.5, -1, -1]


@pytest.mark.parametrize("masks", [False, True])
def test_truncated_responses_can_be_masked_in_both_losses(masks: bool) -> None:
    """The second response is truncated at the limit. Advantages and returns of other responses do not change."""
    batch = rollouts("ab", [1, 3])
    values_BR = torch.zeros(2, 3)
    scored = Scored(batch, torch.tensor([1.0, 2.0]), torch.zeros(2, 3), None, values_BR)
    overrides = [f"algorithm.mask_truncated={str(masks).lower()}", "algorithm.whiten_advantages=false"]
    config = load_config(BASE, overrides)
    algorithm: AlgorithmSettings = config.algorithm.model_copy(update={"kl_in_reward": None})
    experience, _ = ExperienceMaker(algorithm, CPU).make(scored, 2)
    expected_mask = [[True, False, False], [not masks] * 3]
    assert experience.loss_mask_BR.tolist() == expected_mask
    assert critic_updates(cast(Any, SimpleNamespace()), experience, config).fields_BR["mask"].tolist() == expected_mask
    assert experience.returns_BR.tolist() == [[1, 0, 0], [2, 2, 2]]
