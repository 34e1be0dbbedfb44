"""Frozen reward model on an external server, which receives token ids and returns scores.

Each sample is a POST of `{"input_ids": [...]}` to `/classify`, and the answer is `{"embedding": [SCORE]}`. SGLang
supports these requests for sequence classification models, and so does `megappo.rewards.model_server`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megappo.config.reward import RemoteModelSettings
from megappo.config.tokens import Message
from megappo.errors import one_line
from megappo.network.http_client import check_proxy
from megappo.observe.json_values import JSONValue
from megappo.rewards.http import each, key_in, post, raise_reported_error
from megappo.rewards.model import RewardTexts
from megappo.rewards.numbers import as_float, score_problem
from megappo.runtime.objects import attempt

_SHOWN_CHARACTERS = 120


class RemoteRewardModel:
    """Scores from a server. This process tokenises the texts with the model's tokenizer."""

    def __init__(
        self,
        path: str,
        settings: RemoteModelSettings,
        *,
        trust_remote_code: bool = False,
        template_time: str | None = None,
    ) -> None:
        """Load the model's configuration and tokenizer from the folder `path`.

        Raises ValueError if the folder has no tokenizer, the variable of the key is empty, or the server requires a
        SOCKS proxy.
        """
        key = key_in(settings.key, "the reward model's")
        check_proxy(settings.url)
        self._texts = RewardTexts(path, trust_remote_code=trust_remote_code, template_time=template_time)
        self._settings = settings
        self._url = f"{settings.url.rstrip('/')}/classify"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def has_chat_template(self) -> bool:
        """See `RewardModel.has_chat_template`."""
        return self._texts.has_chat_template

    def try_each(self, prompts: Sequence[str | Sequence[Message]], responses: Sequence[str]) -> list[float | str]:
        """Return the score of each sample, or the reason of a failure in its place."""
        read = [
            attempt(partial(self._texts.ids, prompt, response), (ValueError,))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return each(self._score, read, self._settings.concurrency)

    def _score(self, read: tuple[list[int] | None, str]) -> float:
        ids, problem = read
        if ids is None:
            raise ValueError(problem)
        return post(
            self._url,
            {"input_ids": ids},
            _score_of,
            headers=self._headers,
            deadline_seconds=self._settings.timeout_seconds,
            most_tries=self._settings.retries + 1,
        )


def _score_of(answer: JSONValue) -> float:
    """Return the score in an answer of the server. Raises the errors of `read` in `post`."""
    raise_reported_error(answer)
    embedding = answer.get("embedding") if isinstance(answer, dict) else None
    score = embedding[0] if isinstance(embedding, list) and len(embedding) == 1 else None
    if isinstance(score, bool) or not isinstance(score, int | float) or score_problem(as_float(score)):
        raise ValueError(
            f"answered {one_line(str(answer))[:_SHOWN_CHARACTERS]}, must have one number as embedding, finite and "
            "within float32"
        )
    return float(score)
