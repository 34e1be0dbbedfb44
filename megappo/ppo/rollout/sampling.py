"""Rollouts from prompts: seeds, requests, and responses of the engine as padded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megappo.data import PromptDataset, TrainingPrompts
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.engines.rows import check_answers
from megappo.errors import RunError
from megappo.models.context import continuation_text
from megappo.observe.ends import End
from megappo.ppo.rollout.episodes import episodes_of, own_tokens, prompt_ids, turns_mask
from megappo.runtime.process import Runtime
from megappo.runtime.seeds import derived_seed
from megappo.types import Prompt, Prompts, Rollouts


def sample_seed(seed: int, step: int, sample_id: int) -> int:
    """Return a 63-bit seed that depends only on run seed, step and sample, not on scheduling."""
    return derived_seed(seed, step, sample_id)


def share_of_rank(count: int, runtime: Runtime) -> tuple[int, int]:
    """Return start and stop of this rank's share of `count` items."""
    return -(-count * runtime.rank // runtime.world_size), -(-count * (runtime.rank + 1) // runtime.world_size)


def prompts_of_rank(dataset: PromptDataset | TrainingPrompts, indices: Sequence[int], runtime: Runtime) -> Prompts:
    """Return this rank's contiguous share of the prompts of a step.

    Shares differ by at most one prompt. The main rank, which shows its samples, never has a smaller share.
    """
    first, stop = share_of_rank(len(indices), runtime)
    return Prompts(tuple(dataset[i] for i in indices[first:stop]), first)


@dataclass(frozen=True)
class SampleRequests:
    """Requests to the engine for this rank's prompts. Samples of one prompt are consecutive."""

    prompts: tuple[Prompt, ...]
    """Prompt of each sample."""
    sample_ids: tuple[int, ...]
    samples_per_prompt: int
    requests: tuple[GenerateRequest, ...]
    max_total_tokens: int | None = None
    """See `RolloutSettings.max_total_tokens`."""


def room_behind(prompt: Prompt, max_total_tokens: int | None) -> int | None:
    """Return the maximum number of response tokens under the limit on total tokens. None without a limit."""
    return None if max_total_tokens is None else max_total_tokens - len(prompt.token_ids)


def request_samples(
    prompts: Prompts, *, samples_per_prompt: int, seed_of: Callable[[int], int], max_total_tokens: int | None = None
) -> SampleRequests:
    """Return requests for `samples_per_prompt` samples of every prompt.

    `seed_of` returns the seed of a sample by its position in the global batch of the step.
    """
    repeated = tuple(prompt for prompt in prompts.prompts for _ in range(samples_per_prompt))
    first = prompts.first_position * samples_per_prompt
    sample_ids = tuple(range(first, first + len(repeated)))
    requests = tuple(
        GenerateRequest(p.token_ids, seed_of(i), i // samples_per_prompt, room_behind(p, max_total_tokens))
        for p, i in zip(repeated, sample_ids, strict=True)
    )
    return SampleRequests(repeated, sample_ids, samples_per_prompt, requests, max_total_tokens)


def finish_rollout(
    wanted: SampleRequests,
    completions: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    rows: int | None = None,
    answerer: str = "the engine",
) -> Rollouts:
    """Return the responses of the engine as padded tensors, of shape (0, 1) without responses.

    Either all responses have a routing, or no response has a routing. The same applies to episodes. Raises RunError,
    with the name of the `answerer`, for non-finite log-probabilities and for token ids of `rows` or above. If `rows`
    is None, any id is allowed.
    """
    check_answers(completions, rows, answerer, wanted.sample_ids)
    sample_ids = torch.tensor(wanted.sample_ids, dtype=torch.int64)
    token_ids = [own_tokens(c) for c in completions]
    inside = [ids if c.truncated else ids[:-1] for ids, c in zip(token_ids, completions, strict=True)]
    # Decoding omits these tokens: named special tokens, and added tokens that are only marked as special.
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    mask_BR = torch.arange(max(lengths.tolist(), default=1))[None] < lengths[:, None]
    logprob_BR = torch.zeros(mask_BR.shape)
    logprob_BR[mask_BR] = torch.tensor([x for c in completions for x in c.logprobs])
    episodes = episodes_of(completions, mask_BR, tokenizer)
    group_ids = sample_ids // wanted.samples_per_prompt
    return Rollouts(
        prompts=wanted.prompts,
        sample_ids_B=sample_ids,
        group_ids_B=group_ids if episodes is None else torch.where(episodes.failed_B, -1 - sample_ids, group_ids),
        sequences=tuple(
            torch.tensor(prompt_ids(p, c) + c.token_ids) for p, c in zip(wanted.prompts, completions, strict=True)
        ),
        response_lengths_B=lengths,
        engine_logprob_BR=logprob_BR,
        response_mask_BR=turns_mask(completions, mask_BR),
        ends=tuple(end_of(p, c, wanted.max_total_tokens) for p, c in zip(wanted.prompts, completions, strict=True)),
        weight_versions_B=torch.tensor([c.weight_version for c in completions], dtype=torch.int64),
        responses=tuple(continuation_text(tokenizer, ids, skip_special_tokens=True) for ids in token_ids),
        raw_responses=tuple(continuation_text(tokenizer, ids) for ids in token_ids),
        routing=None if completions and completions[0].routing is None else tuple(map(routing_of, completions)),
        special_tokens_B=torch.tensor([sum(i in special for i in ids) for ids in inside], dtype=torch.int64),
        episodes=episodes,
    )


def end_of(prompt: Prompt, completion: Completion, max_total_tokens: int | None) -> End:
    """Return the reason why a response or its episode ended."""
    if completion.episode is not None:
        return completion.episode.end
    if not completion.truncated:
        return End.COMPLETE
    room = room_behind(prompt, max_total_tokens)
    return End.RESPONSE_LIMIT if room is None or len(completion.token_ids) < room else End.POSITION_LIMIT


def routing_of(completion: Completion) -> Tensor:
    """Return the experts of each token of a completion. Raises RunError if the engine did not return experts."""
    if completion.routing is None:
        raise RunError(
            "the engine did not report which experts computed a response; set algorithm.router_replay to false"
        )
    return completion.routing
