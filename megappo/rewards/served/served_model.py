"""Frozen reward model on a server, which receives token ids and returns scores.

A request is a POST of `{"input_ids": [...]}` to `/classify`, and the answer is `{"embedding": [SCORE]}`. A list of
lists of ids is a batch, and the answer is then a list. SGLang supports these requests for sequence classification
models, and so does `megappo.rewards.model_server`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megappo.files.json_values import JSONValue
from megappo.models.tokens import Message
from megappo.rewards.http import ScoreServer, number_in
from megappo.rewards.model import RewardTexts
from megappo.runtime.ranks.objects import attempt

BATCH_SAMPLES = 64
"""Number of samples of a request to a server of the run."""


class ServedRewardModel:
    """Scores from a server. This process tokenises the texts with the model's tokenizer."""

    def __init__(self, texts: RewardTexts, server: ScoreServer, batch_samples: int = 1) -> None:
        """Create the client. `batch_samples`: number of samples of a request, which fail together."""
        self.texts, self._server, self._batch_samples = texts, server, batch_samples

    def score(self, prompts: Sequence[str | Sequence[Message]], responses: Sequence[str]) -> list[float | str]:
        """Return the score of each sample, or the reason of a failure in its place. Raises RunError of the server's
        `check`."""
        read = [attempt(partial(self.texts.ids, p, r), (ValueError,)) for p, r in zip(prompts, responses, strict=True)]
        ids = {i: ids for i, (ids, _) in enumerate(read) if ids is not None}
        order = sorted(ids, key=lambda i: len(ids[i]))  # samples of similar length need less padding
        batches = [order[i : i + self._batch_samples] for i in range(0, len(order), self._batch_samples)]
        answers = self._server.each(lambda batch: self._request([ids[i] for i in batch]), batches)
        scores: list[float | str] = [problem for _, problem in read]
        for batch, answer in zip(batches, answers, strict=True):
            values: Sequence[float | str] = [answer] * len(batch) if isinstance(answer, str) else answer
            for i, score in zip(batch, values, strict=True):
                scores[i] = score
        return scores

    def _request(self, batch: Sequence[Sequence[int]]) -> list[float]:
        def scores(answer: JSONValue) -> list[float]:
            rows = answer if isinstance(answer, list) else [answer]
            if len(rows) != len(batch):
                raise ValueError(f"answered {len(rows)} scores for {len(batch)} samples")
            return [_score_in(row) for row in rows]

        content = batch if self._batch_samples > 1 else batch[0]
        return self._server.post("/classify", {"input_ids": content}, scores)


def _score_in(answer: JSONValue) -> float:
    embedding = answer.get("embedding") if isinstance(answer, dict) else None
    return number_in(answer, embedding[0] if isinstance(embedding, list) and len(embedding) == 1 else None, "embedding")
