"""What a step keeps: groups with a spread, answers that end in time, rewards that pay less for long ones."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megappo.algo.overlong import overlong_penalty
from megappo.config import load_config
from megappo.config.algorithm import AlgorithmSettings
from megappo.observe.ends import End
from megappo.ppo.experience import ExperienceMaker
from megappo.ppo.selection import Selection, joined
from megappo.ppo.updates import critic_updates
from megappo.runtime.tally import Totals
from megappo.types import Episode, Episodes, Prompt, Rollouts, Scored
from tests.support.places import BASE

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("world_of_one")


def rollouts(names: str, lengths: list[int]) -> Rollouts:
    """A sample for each letter, of so many tokens, whose numbers begin with 100 times its place in the alphabet."""
    B, R = len(names), max(lengths)
    lengths_B = torch.tensor(lengths)
    mask_BR = torch.arange(R) < lengths_B[:, None]
    first_B = torch.tensor([100 * (ord(name) - ord("a")) for name in names])
    return Rollouts(
        prompts=tuple(Prompt(i, (1,), name, None, {}) for i, name in enumerate(names)),
        sample_ids_B=torch.arange(B),
        group_ids_B=torch.arange(B) // 2,
        sequences=tuple(torch.tensor([1, *range(int(f), int(f) + n)]) for f, n in zip(first_B, lengths, strict=True)),
        response_lengths_B=lengths_B,
        engine_logprob_BR=torch.where(mask_BR, -first_B[:, None] - torch.arange(R).float(), float("nan")),
        response_mask_BR=mask_BR,
        ends=tuple(End.RESPONSE_LIMIT if length == R else End.COMPLETE for length in lengths),
        weight_versions_B=first_B,
        responses=tuple(names),
        raw_responses=tuple(names.upper()),
        special_tokens_B=lengths_B,
    )


def selection(max_rounds: int = 3) -> Selection:
    return Selection(prompts=2, samples_per_prompt=2, max_rounds=max_rounds)


def of_rewards(**means: tuple[float, float]) -> Totals:
    """Metrics of a round: sum and count of each."""
    return Totals({f"reward/{name}": both for name, both in means.items()}, {}, {})


def check_names(found: Rollouts, names: str) -> None:
    """Whatever is said of a sample is said of the one that it was said of."""
    B, R = len(names), int(found.response_lengths_B.max())
    firsts = [100 * (ord(name) - ord("a")) for name in names]
    assert found.responses == tuple(names) and found.raw_responses == tuple(names.upper())
    assert tuple(prompt.text for prompt in found.prompts) == tuple(names)
    assert found.weight_versions_B.tolist() == firsts and found.sample_ids_B.tolist() == list(range(B))
    assert found.engine_logprob_BR.shape == found.response_mask_BR.shape == (B, R)
    for b, (first, length) in enumerate(zip(firsts, found.response_lengths_B.tolist(), strict=True)):
        assert found.sequences[b].tolist() == [1, *range(first, first + length)]
        assert found.response_mask_BR[b].tolist() == [i < length for i in range(R)]
        assert found.engine_logprob_BR[b, :length].tolist() == [-first - i for i in range(length)]


def test_groups_without_a_spread_are_replaced() -> None:
    chosen = selection()
    chosen.add(rollouts("abcd", [1, 2, 3, 1]), torch.tensor([1.0, 1.0, 0.0, 1.0]), of_rewards(failures=(0, 4)))
    assert (chosen.kept, chosen.wanted) == (1, 2)  # one group is missing; half of the groups are kept
    chosen.add(rollouts("efgh", [5, 1, 1, 1]), torch.tensor([0.5, 0.5, 0.25, 0.0]), of_rewards(failures=(2, 4)))
    assert chosen.wanted == 0
    found, scores_B, metrics = chosen.finish()
    check_names(found, "cdgh")
    assert scores_B.tolist() == [0.0, 1.0, 0.25, 0.0] and found.group_ids_B.tolist() == [0, 0, 1, 1]
    assert metrics == {"group/spread": 0.5, "group/rounds": 2, "group/filled": 0, "reward/failures": 0.25}


def test_the_rounds_are_bounded_and_the_step_is_full() -> None:
    """If groups are missing after the last round, the first groups with equal rewards fill the step."""
    chosen, scores_B = selection(max_rounds=2), torch.zeros(4)
    chosen.add(rollouts("abcd", [1, 1, 1, 1]), scores_B, of_rewards())
    assert chosen.wanted == 2
    chosen.add(rollouts("efgh", [2, 2, 2, 2]), torch.tensor([0.0, 0.0, 0.0, 1.0]), of_rewards())
    assert chosen.wanted == 0
    found, _, metrics = chosen.finish()
    check_names(found, "abgh")
    assert metrics == {"group/spread": 0.25, "group/rounds": 2, "group/filled": 0.5}


def test_the_mean_over_rounds_is_weighted_by_the_graded_samples() -> None:
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


def test_a_round_without_equal_groups_is_not_changed() -> None:
    chosen, given = selection(), rollouts("abcd", [3, 1, 2, 2])
    chosen.add(given, torch.tensor([0.0, 1.0, 1.0, 0.0]), of_rewards())
    found, _, metrics = chosen.finish()
    assert metrics == {"group/spread": 1.0, "group/rounds": 1.0, "group/filled": 0.0}
    for each in fields(given):
        before, after = getattr(given, each.name), getattr(found, each.name)
        if isinstance(before, torch.Tensor):
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        elif each.name != "sequences":
            assert after == before


def test_episodes_and_those_that_failed() -> None:
    """A group of which one is left has no spread; turns' rewards count in it, and keep their places."""
    failed, fine = Episode((), failure="hung"), Episode(())
    rewards_BR = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.5, 0.0]])
    episodes = Episodes((fine, failed, fine, fine), rewards_BR, tuple(({"by": name},) for name in "abcd"))
    given = replace(rollouts("abcd", [2, 2, 1, 1]), group_ids_B=torch.tensor([0, -2, 1, 1]), episodes=episodes)
    chosen = Selection(prompts=1, samples_per_prompt=2, max_rounds=2)
    chosen.add(given, torch.zeros(4), of_rewards())
    found, _, metrics = chosen.finish()
    check_names(found, "cd")
    assert metrics["group/spread"] == 0.5 and found.episodes is not None
    assert found.episodes.turn_rewards_BR.tolist() == [[0.0], [0.5]]
    assert found.episodes.of_samples == (fine, fine) and found.episodes.conversations == (
        ({"by": "c"},),
        ({"by": "d"},),
    )
    only_failed = joined([(given, [1]), (given, [])])
    assert only_failed.group_ids_B.tolist() == [-2] and len(joined([(given, [])]).responses) == 0


def test_overlong_answers_lose_more_and_more() -> None:
    """DAPO's figures: a limit of 20,480 tokens, of which the last 4,096 cost."""
    lengths_B = torch.tensor([1, 16384, 17408, 18432, 20480, 30000])
    found = overlong_penalty(lengths_B, most_tokens=20480, buffer_tokens=4096)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1]


@pytest.mark.parametrize("masks", [False, True])
def test_truncated_answers_may_be_left_out_of_both_losses(masks: bool) -> None:
    """The second is cut at the limit. Advantages and returns of the others do not change."""
    given = rollouts("ab", [1, 3])
    values_BR = torch.zeros(2, 3)
    scored = Scored(given, torch.tensor([1.0, 2.0]), torch.zeros(2, 3), None, values_BR)
    words = [f"algorithm.mask_truncated={str(masks).lower()}", "algorithm.whiten_advantages=false"]
    config = load_config(BASE, words)
    algorithm: AlgorithmSettings = config.algorithm.model_copy(update={"kl_in_reward": None})
    experience, _ = ExperienceMaker(algorithm, CPU).make(scored, 2)
    wanted = [[True, False, False], [not masks] * 3]
    assert experience.loss_mask_BR.tolist() == wanted
    assert critic_updates(cast(Any, SimpleNamespace()), experience, config).fields_BR["mask"].tolist() == wanted
    assert experience.returns_BR.tolist() == [[1, 0, 0], [2, 2, 2]]
