"""Functions that the settings name by an import path, as types.

Each is called by keyword with what it has parameters for, and with its options; so these types leave parameters open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class RewardFunction(Protocol):
    """What `reward.function` names, called in a worker process with `reward.options`."""

    def __call__(self, *_: Any, **offered: Any) -> float | Sequence[float]:
        """The score of a response; with `reward.batch` one for each.

        May have parameters prompt, response, answer (texts, the last None where the data have none), metadata (a dict),
        raw_response, prompt_token_ids, token_ids, truncated and conversation. With `reward.batch` these are
        lists: prompts, responses, answers, metadata, raw_responses, conversations. What it raises fails the sample.
        """


class AdvantageEstimator(Protocol):
    """What `algorithm.estimator` names, called with `algorithm.estimator_options`."""

    def __call__(self, *_: Any, **offered: Any) -> tuple[Tensor, Tensor]:
        """Advantages and returns, both (B, T) float32 and 0 where `mask` is False.

        May have parameters rewards, values (B, T), mask (B, T) bool, group_ids (B,) int64, gamma, lam, critic_lam and
        gae; see `megappo.algo.estimators`. One that takes values needs a critic.
        """


class PolicyLoss(Protocol):
    """What `algorithm.policy_loss` names, called with `algorithm.policy_loss_options`; autograd differentiates it."""

    def __call__(self, *_: Any, **offered: Any) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of each token (N,), with further numbers (N,) to report where it has some.

        May have parameters logprob, entropy, old_logprob, log_ratio (nats), advantages, ref_logprob, all (N,), and
        sequence_mean; see `megappo_kernels.own_losses`.
        """


class PromptSource(Protocol):
    """What `data.train.source` and its like name, called with the source's `options`."""

    def __call__(self, *_: Any, **options: Any) -> Iterable[Mapping[str, Any]]:
        """Records in their order, the same at every call: `prompt` (a text or chat messages), `answer` (a text, a
        number or None) and perhaps `metadata` (a mapping that can be pickled)."""
