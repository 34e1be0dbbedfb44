"""Scores of the responses of a step, from functions, judges, reward models and environments."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megappo.config.schema import RewardSettings
from megappo.config.sections.reward import MODEL, MODEL_SERVER
from megappo.errors import one_line
from megappo.models.model_files import model_folder
from megappo.models.tokens import Message
from megappo.network.http_client import check_proxy
from megappo.observe.terminal.messages import show_message
from megappo.rewards.http import ScoreServer
from megappo.rewards.limit import FailureLimit
from megappo.rewards.numbers import score_problem
from megappo.rewards.processes.workers import RewardPool, RewardRequest, RewardResult, too_many_failures
from megappo.rewards.registry import OF_ENVIRONMENT, check_reward
from megappo.runtime.ranks.objects import first_of_ranks
from megappo.types import CHAT_MESSAGES, Rollouts

if TYPE_CHECKING:
    from megappo.rewards.model import RewardModel
    from megappo.rewards.served.served_model import ServedRewardModel
    from megappo.rewards.served.servers import OwnServers
    from megappo.runtime.ranks.tally import Totals
    from megappo.runtime.watch.notices import Notices


@dataclass(frozen=True)
class _Verdicts:
    """Statistics of a judge for the samples of this rank in one step."""

    samples: int
    notes: tuple[str, ...]
    """Reasons for texts without a verdict, one for each such sample."""
    seconds: float


@dataclass(frozen=True)
class _Worth:
    """Scores of the samples of this rank."""

    result: RewardResult
    of_terms: Mapping[str, Tensor] = field(default_factory=dict)
    """Scores (B,) of each of several functions, by name."""
    verdicts: Mapping[str, _Verdicts] = field(default_factory=dict)
    """Statistics of judges, by the names in `RewardSettings.judges`."""


class RewardScorer:
    """Application of the configured rewards. Every rank scores its own responses."""

    def __init__(
        self,
        settings: RewardSettings,
        device: torch.device,
        servers: OwnServers | None = None,
        *,
        trust_remote_code: bool = False,
        template_time: str | None = None,
        notices: Notices | None = None,
    ) -> None:
        """Start workers or load the model. Raises ValueError for an unusable function or model.

        `servers` are own servers of judges and a model, which end together with the scorer. `trust_remote_code`
        permits code from the reward model's folder. `template_time` is the time for the chat template of the reward
        model (`DataSettings`). `notices` transfers messages between ranks, so that ranks count the failures of all
        ranks during scoring.
        """
        self._servers, self._trust_remote_code, self._template_time = servers, trust_remote_code, template_time
        for _, term in settings.terms.values():
            check_reward(term)
        self._settings, self._device, self._notices, self._calls = settings, device, notices, 0
        self._judges_with_note = set[str]()
        self._pools: dict[str, RewardPool] = {}
        """Worker pools by the names in `RewardSettings.terms`."""
        self._model: RewardModel | ServedRewardModel | None = None
        try:
            if settings.model_path is not None:
                self._model = self._load_or_connect(settings.model_path)
            for name, (_, term) in settings.terms.items():
                if term.function not in (MODEL, OF_ENVIRONMENT):
                    self._pools[name] = self._pool(name, term)
        except (ValueError, RuntimeError, OSError):
            self.close()
            raise

    def _load_or_connect(self, path: str) -> RewardModel | ServedRewardModel:
        """Load the reward model, or connect to the server with the model."""
        from megappo.rewards.model import RewardModel, RewardTexts
        from megappo.rewards.served.served_model import BATCH_SAMPLES, ServedRewardModel

        remote, own = self._settings.model_remote, self._servers
        trusts, now = self._trust_remote_code, self._template_time
        if own is not None and MODEL_SERVER in own.clients:
            server, samples = replace(own.clients[MODEL_SERVER], check=own.check), BATCH_SAMPLES
        elif remote is not None:
            server, samples = ScoreServer.of(remote, "the reward model's"), 1
            check_proxy(server.url)
        else:
            folder = str(model_folder(path, key="reward.model_path"))
            dtype = getattr(torch, self._settings.model_dtype(on_cuda=self._device.type == "cuda"))
            return RewardModel(folder, dtype=dtype, device=self._device, trust_remote_code=trusts, template_time=now)
        folder = str(model_folder(path, weights=False, key="reward.model_path"))
        texts = RewardTexts(folder, trust_remote_code=trusts, template_time=now)
        return ServedRewardModel(texts, server, samples)

    def _pool(self, name: str, term: RewardSettings) -> RewardPool:
        own = self._servers
        server = None if own is None or term.judge is None else own.clients.get(name or "judge")
        return RewardPool(term) if own is None or server is None else RewardPool(term, server, own.check)

    def score(self, rollouts: Rollouts, failures: MutableMapping[int, str] | None = None) -> tuple[Tensor, Totals]:
        """Return scores (B,) float32 of this rank, and metrics over all ranks.

        The metrics are `reward/failures`, `reward/timeouts`, the mean score of each of several functions, and
        statistics of judges. `failures` receives the reason for the failure score of each failed sample of this rank,
        by its position. The call is a collective of the whole world. Raises RewardError on every rank if too many
        samples of all ranks failed, so that no rank waits for a stopped rank.
        """
        from megappo.runtime.ranks.tally import Tally

        scored, tally = self._result(rollouts, self._limit(len(rollouts.responses))), Tally()
        result, B = scored.result, len(scored.result.scores)
        tally.mean("reward/failures", torch.arange(B) < len(result.failures))
        tally.mean("reward/timeouts", torch.arange(B) < result.timeouts)
        for name, scores_B in scored.of_terms.items():
            own_B = torch.tensor([self._settings.is_for(name, p.metadata) for p in rollouts.prompts], dtype=torch.bool)
            tally.mean(f"reward/{name}", scores_B, own_B & rollouts.scored_B)
        for name, verdicts in scored.verdicts.items():
            tally.mean(f"reward/{name}/unreadable", torch.arange(verdicts.samples) < len(verdicts.notes))
            tally.maximum(f"reward/{name}/seconds", torch.tensor([verdicts.seconds]))
        metrics = tally.reduce_totals(self._device)
        self._show_notes(scored.verdicts, metrics)
        failed, samples = map(int, metrics.means["reward/failures"])
        # Both numbers are sums over all ranks, so all ranks take this branch and its collective together.
        if failed > self._settings.max_failure_fraction * samples:
            late = int(metrics.means["reward/timeouts"][0])
            raise too_many_failures(self._settings, failed, samples, first_of_ranks(result.failures), late=late)
        if failures is not None:
            failures.update(result.failures)
        return result.scores, metrics

    def _show_notes(self, verdicts: Mapping[str, _Verdicts], metrics: Totals) -> None:
        """Print the first text without a verdict of each judge. Collective if a judge has its first such text."""
        for name in sorted(verdicts.keys() - self._judges_with_note):
            if metrics.means[f"reward/{name}/unreadable"][0] > 0:
                self._judges_with_note.add(name)
                notes = first_of_ranks(verdicts[name].notes)
                if torch.distributed.get_rank() == 0:
                    share = f"samples without a verdict score `unreadable` and count in reward/{name}/unreadable"
                    show_message(
                        f"the first text of the judge '{name}' without a verdict: {one_line(notes[0])}; {share}",
                        warns=True,
                    )

    def score_local(self, rollouts: Rollouts, failures: MutableMapping[int, str] | None = None) -> Tensor:
        """Return scores (B,) float32 of this rank without any collective.

        Without `failures`, raises RewardError if too many samples of this rank failed. With `failures`, all ranks must
        call this method. The method then adds the failures of this rank to `failures`, as `score` does, and the limit
        applies to the failures of all ranks.
        """
        result = self._result(rollouts, None if failures is None else self._limit(len(rollouts.responses))).result
        if failures is not None:
            failures.update(result.failures)
        elif len(result.failures) > self._settings.max_failure_fraction * len(result.scores):
            raise too_many_failures(self._settings, len(result.failures), len(result.scores), result.failures)
        return result.scores

    def _limit(self, samples: int) -> FailureLimit | None:
        """Return the limit of failures for this call. All ranks make the call."""
        self._calls += 1
        if self._notices is None:
            return None
        most, ranks = self._settings.max_failure_fraction, torch.distributed.get_world_size()
        return FailureLimit(self._notices, self._calls, samples, most, ranks=ranks)

    def _result(self, rollouts: Rollouts, limit: FailureLimit | None) -> _Worth:
        """Return scores of all samples. Samples of failed episodes skip the functions and get the failure score."""
        if rollouts.episodes is None:
            return self._scored(rollouts, range(len(rollouts.responses)), limit)
        failed_B = rollouts.episodes.failed_B
        whole = (~failed_B).nonzero()[:, 0].tolist()
        scored = self._scored(rollouts, whole, limit)

        def with_failed(scores: Tensor) -> Tensor:
            scores_B = torch.full(failed_B.shape, self._settings.failure_score, dtype=torch.float32)
            scores_B[whole] = scores
            return scores_B

        scores_B = with_failed(scored.result.scores)
        totals_B = rollouts.total_rewards_B(scores_B)
        beyond = self._finite(totals_B, "the score with the environment's rewards is").failures
        scores_B[[b for b, _ in beyond]] = self._settings.failure_score
        failures = sorted([(whole[i], reason) for i, reason in scored.result.failures] + beyond)
        every = {name: with_failed(scores) for name, scores in scored.of_terms.items()}
        late = frozenset(whole[i] for i in scored.result.late)
        return _Worth(RewardResult(scores_B, failures, late), every, scored.verdicts)

    def _scored(self, rollouts: Rollouts, chosen: Sequence[int], limit: FailureLimit | None) -> _Worth:
        """Return scores of the samples `chosen` in this order, by each function that applies to their prompts."""
        judges, results, verdicts = self._settings.judges, dict[str, RewardResult](), dict[str, _Verdicts]()
        requests = [_request(rollouts, b) for b in chosen] if self._pools else []
        for name, (_, term) in self._settings.terms.items():
            if term.function == OF_ENVIRONMENT:
                return _Worth(RewardResult(torch.zeros(len(chosen)), []))
            own = [i for i, b in enumerate(chosen) if self._settings.is_for(name, rollouts.prompts[b].metadata)]
            if term.function == MODEL:
                results[name] = _spread(self._by_model(rollouts, [chosen[i] for i in own]), own, len(chosen))
                continue
            started = time.monotonic()
            result = self._pools[name].run([requests[i] for i in own], None if limit is None else limit.of(name))
            results[name] = _spread(result, own, len(chosen))
            if (metric := name or "judge") in judges:
                notes = tuple(note for _, note in result.notes)
                verdicts[metric] = _Verdicts(len(own), notes, time.monotonic() - started)
        of_terms = {name: result.scores for name, result in results.items() if name}
        return _Worth(self._sum(results), of_terms, verdicts)

    def _by_model(self, rollouts: Rollouts, chosen: Sequence[int]) -> RewardResult:
        """Return scores of the samples `chosen` by the reward model."""
        assert self._model is not None, "settings with `model` have a path"
        chat = self._model.texts.has_chat_template  # prompts are then sent as messages
        prompts, responses = [rollouts.prompts[b] for b in chosen], [rollouts.responses[b] for b in chosen]
        scores = self._model.score(
            [p.metadata.get(CHAT_MESSAGES, p.text) if chat else p.text for p in prompts], responses
        )
        failures = [(i, score) for i, score in enumerate(scores) if isinstance(score, str)]
        numbers = [self._settings.failure_score if isinstance(score, str) else float(score) for score in scores]
        result = self._finite(torch.tensor(numbers, dtype=torch.float32), "the reward model gave")
        return RewardResult(result.scores, sorted([*failures, *result.failures]))

    def _sum(self, results: dict[str, RewardResult]) -> RewardResult:
        """Return the weighted sum. A sample that failed with any function has the failure score."""
        if "" in results:
            return results[""]
        weights = {name: weight for name, (weight, _) in self._settings.terms.items()}
        total = torch.stack([weights[name] * result.scores for name, result in results.items()]).sum(0)
        if not total.isfinite().all():  # terms beyond float32 can have a sum within float32
            exact = sum(weights[name] * result.scores.double() for name, result in results.items())
            total = torch.where(total.isfinite(), total, torch.as_tensor(exact).float())
        late = {i for result in results.values() for i in result.late}
        failures = {
            i: f"{name}: {reason}"
            for name, result in results.items()
            for i, reason in result.failures
            if i not in late or i in result.late  # a time-out takes precedence over other failures
        }
        total[[*failures]] = self._settings.failure_score
        summed = self._finite(total, "the weighted sum of reward.functions is")
        return RewardResult(summed.scores, sorted([*failures.items(), *summed.failures]), frozenset(late))

    def _finite(self, scores: Tensor, subject: str) -> RewardResult:
        """Return the scores with a failure for each score that is not finite or exceeds float32.

        `subject` is the beginning of the sentence about a failure.
        """
        problems = [(i, score_problem(score)) for i, score in enumerate(scores.tolist())]
        failures = [(i, f"{subject} {problem}") for i, problem in problems if problem]
        scores = scores.masked_fill(~scores.isfinite(), self._settings.failure_score)
        return RewardResult(scores, failures)

    def close(self) -> None:
        """End the workers and the servers."""
        for pool in self._pools.values():
            pool.close()
        if self._servers is not None:
            self._servers.close()


def _spread(result: RewardResult, places: Sequence[int], samples: int) -> RewardResult:
    """Return the result of a subset at `places` as a result of all `samples` samples. The other samples have 0."""
    if len(places) == samples:
        return result
    scores_B = torch.zeros(samples)
    scores_B[list(places)] = result.scores
    failures = [(places[i], reason) for i, reason in result.failures]
    return RewardResult(scores_B, failures, frozenset(places[i] for i in result.late))


def _request(rollouts: Rollouts, b: int) -> RewardRequest:
    prompt, length = rollouts.prompts[b], int(rollouts.response_lengths_B[b])
    ids = rollouts.sequences[b].tolist()
    return RewardRequest(
        prompt.text,
        rollouts.responses[b],
        rollouts.raw_responses[b],
        prompt.answer,
        prompt.metadata,
        prompt_token_ids=ids[: len(ids) - length],
        token_ids=ids[len(ids) - length :],
        truncated=rollouts.ends[b].is_truncated,
        conversation=_conversation(rollouts, b),
    )


def _conversation(rollouts: Rollouts, b: int) -> list[Message]:
    """Return the messages of the prompt and of the response or the episode, with their roles."""
    prompt = rollouts.prompts[b]
    begun = list(prompt.metadata.get(CHAT_MESSAGES, [{"role": "user", "content": prompt.text}]))
    if rollouts.episodes is None:
        return [*begun, {"role": "assistant", "content": rollouts.responses[b]}]
    roles = {"model": "assistant", "environment": "environment"}
    turns = rollouts.episodes.conversations[b]
    return [*begun, *({"role": roles[turn["by"]], "content": turn["text"]} for turn in turns)]
