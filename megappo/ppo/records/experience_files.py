"""Parquet files of experience: one row per sample, with all inputs of the updates of a step.

Each rank writes its own samples. Numbers are stored exactly. Optional parts without values in a run (a critic, a
reference, an environment) have no column. `pandas.read_parquet` and similar functions read one file or the folder of
a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megappo.errors import ConfigError, reason, writing
from megappo.files.parquet_files import ColumnFile
from megappo.observe.saved_samples import (
    ALONE,
    DATA_SOURCE,
    END,
    EPISODE,
    TOKEN_TEXTS,
    TURN_REWARDS,
    ends_of,
    samples_in,
)
from megappo.types import Episode, Episodes, Experience, Prompt, Rollouts, Scored

if TYPE_CHECKING:
    import pyarrow

_ROUTING, _ROUTING_SHAPE, _ROUTING_TYPE = "routing", "routing_shape", "routing_type"
_PER_TOKEN = {
    "token_versions": "token_versions_BR", "engine_logprobs": "engine_logprob_BR", "response_mask": "response_mask_BR",
    "old_logprobs": "old_logprob_BR", "ref_logprobs": "ref_logprob_BR", "values": "values_BR", "kl": "kl_BR",
    "token_rewards": "rewards_BR", "advantages": "advantages_BR", "returns": "returns_BR", "loss_mask": "loss_mask_BR",
    "importance_weights": "importance_weights_BR",
}  # fmt: skip
"""Columns with one number per response token, and their source fields."""
_PER_SAMPLE = {
    "sample_id": "sample_ids_B", "group_id": "group_ids_B", "truncated": "truncated_B",
    "special_tokens": "special_tokens_B", "weight_version": "weight_versions_B",
}  # fmt: skip


@dataclass(frozen=True)
class SavedSamples:
    """Saved samples of one rank in a step."""

    experience: Experience
    """Experience of the samples. `scored.scores_B` contains the scores used in training, without turn rewards of
    environments."""
    given_B: Tensor
    """float32 scores as returned by the reward, before `reward.scale` and similar settings."""

    @property
    def sample_ids(self) -> list[int]:
        """Position of each sample in the global batch of the step."""
        ids: list[int] = self.experience.scored.rollouts.sample_ids_B.tolist()
        return ids


def require_parquet() -> None:
    """Raise ConfigError if pyarrow is not installed. These files require pyarrow."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"experience is saved as parquet, and pyarrow cannot be imported ({reason(error)}); pip install pyarrow"
        ) from error


def write_samples(path: Path, samples: SavedSamples, rows: Sequence[int], text_of: Callable[[int], str]) -> None:
    """Write these rows of a rank's samples. Raises OSError.

    `text_of`: returns the text of a token for readers. It is called once per distinct token.
    """
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(dict(_columns(samples, list(rows), text_of)))
    with writing(path):
        parquet.write_table(table, path)


def _columns(
    samples: SavedSamples, rows: list[int], text_of: Callable[[int], str]
) -> Iterator[tuple[str, pyarrow.Array]]:
    import pyarrow

    experience = samples.experience
    scored, rollouts = experience.scored, experience.scored.rollouts
    prompts, lengths_B = [rollouts.prompts[b] for b in rows], rollouts.response_lengths_B[rows]
    lengths = lengths_B.tolist()
    in_response_BR = torch.arange(rollouts.response_mask_BR.shape[1])[None] < lengths_B[:, None]

    def of_tokens(values_BR: Tensor) -> pyarrow.Array:
        return _lists(values_BR[rows][in_response_BR], lengths)

    for name, key in _PER_SAMPLE.items():
        yield name, pyarrow.array(getattr(rollouts, key)[rows].numpy())
    yield END, _texts([rollouts.ends[b] for b in rows])
    yield "prompt_index", pyarrow.array([prompt.index for prompt in prompts], pyarrow.int64())
    for name in ("text", "answer", "source"):
        yield {"text": "prompt"}.get(name, name), _texts([getattr(prompt, name) for prompt in prompts])
    yield DATA_SOURCE, _texts([_task(prompt) for prompt in prompts])
    for name in ("responses", "raw_responses"):
        yield name.removesuffix("s"), _texts([getattr(rollouts, name)[b] for b in rows])
    failures = rollouts.reward_failures or ("",) * len(rollouts.prompts)
    yield "reward_failure", _texts([failures[b] for b in rows])
    for name, scores_B in (("score", samples.given_B), ("reward", scored.scores_B)):
        yield name, pyarrow.array(rollouts.total_rewards_B(scores_B)[rows].numpy())
        if rollouts.episodes is not None:
            yield ALONE[name], pyarrow.array(scores_B[rows].numpy())
    ids = [rollouts.sequences[b] for b in rows]
    prompt_tokens = [sequence[: len(sequence) - length] for sequence, length in zip(ids, lengths, strict=True)]
    response_tokens = [sequence[len(sequence) - length :] for sequence, length in zip(ids, lengths, strict=True)]
    yield "prompt_tokens", _lists(_cat(prompt_tokens), [len(tokens) for tokens in prompt_tokens])
    yield "response_tokens", _lists(_cat(response_tokens), lengths)
    yield TOKEN_TEXTS, _text_lists(_cat(response_tokens), lengths, text_of)
    for name, key in _PER_TOKEN.items():
        values_BR = next(getattr(x, key) for x in (rollouts, scored, experience) if hasattr(x, key))
        if values_BR is not None:
            yield name, of_tokens(values_BR)
    yield "ratios", of_tokens((scored.old_logprob_BR - rollouts.engine_logprob_BR).exp())
    if rollouts.episodes is not None:
        yield TURN_REWARDS, of_tokens(rollouts.episodes.turn_rewards_BR)
        yield EPISODE, _texts([json.dumps(asdict(rollouts.episodes.of_samples[b])) for b in rows])
        yield "conversation", _texts([json.dumps(rollouts.episodes.conversations[b]) for b in rows])
    if rollouts.routing is not None:
        routing = [rollouts.routing[b].numpy() for b in rows]
        yield _ROUTING, pyarrow.array([x.tobytes() for x in routing], pyarrow.binary())
        yield _ROUTING_SHAPE, pyarrow.array([list(x.shape) for x in routing], pyarrow.list_(pyarrow.int64()))
        yield _ROUTING_TYPE, _texts([str(x.dtype) for x in routing])


def _task(prompt: Prompt) -> str | None:
    task = prompt.metadata.get(DATA_SOURCE)
    return task if isinstance(task, str) else None


def _texts(values: Sequence[str | None]) -> pyarrow.Array:
    """Return an array of texts. Unpaired surrogates in model output are not valid UTF-8 and are replaced."""
    import pyarrow

    encodable = [None if text is None else text.encode("utf-8", "replace").decode("utf-8") for text in values]
    return pyarrow.array(encodable, pyarrow.string())


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.zeros(0, dtype=torch.int64)


def _lists(flat: Tensor, lengths: Sequence[int]) -> pyarrow.Array:
    import pyarrow

    return _rows(pyarrow.array(flat.contiguous().numpy()), lengths)


def _rows(flat: pyarrow.Array, lengths: Sequence[int]) -> pyarrow.Array:
    import pyarrow

    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets.numpy()), flat)


def _text_lists(flat: Tensor, lengths: Sequence[int], text_of: Callable[[int], str]) -> pyarrow.Array:
    known, places = flat.unique(return_inverse=True)
    texts = _texts([text_of(token) for token in known.tolist()])
    return _rows(texts.take(_lists(places, [len(flat)]).flatten()), lengths)


def sample_ids_of(path: Path) -> list[int]:
    """Return the sample ids of a file in file order. Raises ValueError if the file is damaged."""
    with samples_in(path) as file:
        ids: list[int] = file.numbers("sample_id").tolist()
        return ids


def read_samples(path: Path) -> SavedSamples:
    """Read a file of `write_samples`. Raises ValueError if the file is damaged or has another format."""
    with samples_in(path) as file:
        scored = Scored(
            rollouts=_rollouts(file),
            scores_B=_alone(file, "reward"),
            old_logprob_BR=_tokens(file, "old_logprobs"),
            ref_logprob_BR=_tokens_or_none(file, "ref_logprobs"),
            values_BR=_tokens_or_none(file, "values"),
        )
        experience = Experience(
            scored=scored,
            advantages_BR=_tokens(file, "advantages"),
            returns_BR=_tokens(file, "returns"),
            importance_weights_BR=_tokens_or_none(file, "importance_weights"),
            loss_mask_BR=_tokens(file, "loss_mask"),
            rewards_BR=_tokens(file, "token_rewards"),
            kl_BR=_tokens_or_none(file, "kl"),
        )
        return SavedSamples(experience, _alone(file, "score"))


def _rollouts(file: ColumnFile) -> Rollouts:
    prompt_tokens, response_tokens = _split(file, "prompt_tokens"), _split(file, "response_tokens")
    lengths_B = torch.tensor([len(tokens) for tokens in response_tokens], dtype=torch.int64)
    texts = zip(
        *(file.plain(name) for name in ("prompt_index", "prompt", "answer", "source", DATA_SOURCE)), strict=True
    )
    prompts = tuple(
        Prompt(index, tuple(tokens.tolist()), text, answer, {} if task is None else {DATA_SOURCE: task}, source)
        for tokens, (index, text, answer, source, task) in zip(prompt_tokens, texts, strict=True)
    )
    return Rollouts(
        prompts=prompts,
        sample_ids_B=_numbers(file, "sample_id"),
        group_ids_B=_numbers(file, "group_id"),
        sequences=tuple(torch.cat(both) for both in zip(prompt_tokens, response_tokens, strict=True)),
        response_lengths_B=lengths_B,
        engine_logprob_BR=_tokens(file, "engine_logprobs"),
        response_mask_BR=_tokens(file, "response_mask"),
        ends=tuple(ends_of(file)),
        weight_versions_B=_numbers(file, "weight_version"),
        responses=tuple(file.plain("response")),
        raw_responses=tuple(file.plain("raw_response")),
        special_tokens_B=_numbers(file, "special_tokens"),
        episodes=_episodes(file),
        token_versions_BR=_tokens_or_none(file, "token_versions"),
        reward_failures=tuple(file.plain("reward_failure")),
        routing=_routing(file),
    )


def _episodes(file: ColumnFile) -> Episodes | None:
    if EPISODE not in file:
        return None
    return Episodes(
        tuple(Episode.read(json.loads(text), truncated=False) for text in file.plain(EPISODE)),
        _tokens(file, TURN_REWARDS),
        tuple(tuple(json.loads(content)) for content in file.plain("conversation")),
    )


def _routing(file: ColumnFile) -> tuple[Tensor, ...] | None:
    if _ROUTING not in file:
        return None
    kinds = {str(kind).removeprefix("torch."): kind for kind in (torch.uint8, torch.int16)}
    columns = zip(file.plain(_ROUTING), _split(file, _ROUTING_SHAPE), file.plain(_ROUTING_TYPE), strict=True)
    return tuple(
        torch.frombuffer(bytearray(content), dtype=kinds[kind]).view(shape.tolist()) for content, shape, kind in columns
    )


def _numbers(file: ColumnFile, name: str) -> Tensor:
    """Return a column with one number per row as a (B,) tensor."""
    return torch.from_numpy(file.numbers(name).copy())


def _alone(file: ColumnFile, name: str) -> Tensor:
    """Return `reward` or `score` without turn rewards as a (B,) tensor."""
    return _numbers(file, ALONE[name] if EPISODE in file else name)


def _split(file: ColumnFile, name: str) -> tuple[Tensor, ...]:
    """Return a column of lists as one tensor per row."""
    lengths, flat = file.lists(name)
    return torch.from_numpy(flat.copy()).split(lengths) if lengths else ()


def _tokens(file: ColumnFile, name: str) -> Tensor:
    """Return a column of lists as a (B, R) tensor, padded with 0 to the longest row."""
    lengths, numbers = file.lists(name)
    flat = torch.from_numpy(numbers.copy())
    return pad_sequence(flat.split(lengths), batch_first=True) if lengths else flat.new_zeros(0, 1)


def _tokens_or_none(file: ColumnFile, name: str) -> Tensor | None:
    """Return a column like `_tokens`, or None if the file lacks the column."""
    return _tokens(file, name) if name in file else None
