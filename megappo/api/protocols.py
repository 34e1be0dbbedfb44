"""Types of the functions that the settings name by an import path.

A function receives the keyword arguments that it has parameters for, and its options. These types therefore accept
any parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class RewardFunction(Protocol):
    """Function of the setting `reward.function`. Called in a worker process with `reward.options`."""

    def __call__(self, *_: Any, **offered: Any) -> float | Sequence[float]:
        """Return the score of a response, or one score per response with `reward.batch`.

        Possible parameters are prompt, response, answer (texts; answer is None if the data have no answer), metadata
        (a dict), raw_response, prompt_token_ids, token_ids, truncated and conversation. With `reward.batch` the
        parameters are lists: prompts, responses, answers, metadata, raw_responses, conversations. An exception fails
        the sample.
        """


class AdvantageEstimator(Protocol):
    """Function of the setting `algorithm.estimator`. Called with `algorithm.estimator_options`."""

    def __call__(self, *_: Any, **offered: Any) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, both (B, T) float32 and 0 where `mask` is False.

        Possible parameters are rewards, values (B, T), mask (B, T) bool, group_ids (B,) int64, gamma, lam, critic_lam
        and gae. See `megappo.algo.estimators`. An estimator with a required parameter values needs a critic.
        """


class PolicyLoss(Protocol):
    """Function of the setting `algorithm.policy_loss`. Called with `algorithm.policy_loss_options`, and
    differentiated by autograd."""

    def __call__(self, *_: Any, **offered: Any) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of each token (N,), and optionally further metrics (N,).

        Possible parameters are logprob, entropy, old_logprob, log_ratio (nats), advantages, ref_logprob, all (N,),
        and sequence_mean. See `megappo_kernels.own_losses`.
        """


class PromptSource(Protocol):
    """Function of the setting `data.train.source` and of other data sources. Called with the `options` of the
    source."""

    def __call__(self, *_: Any, **options: Any) -> Iterable[Mapping[str, Any]]:
        """Return records in a fixed order, equal in every call. A record has `prompt` (a text or chat messages),
        `answer` (a text, a number or None) and optionally `metadata` (a mapping that can be pickled)."""
