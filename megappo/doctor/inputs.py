"""Checks of the inputs of a run in addition to its models: prompts, rewards of samples, methods and origins of
weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from megappo.config import Config, derive
from megappo.config.role_models import load_architecture, load_tokenizer, role_folder
from megappo.config.sections.reward import MODEL
from megappo.config.templates import end_of_turn_notes, thinking_notes
from megappo.data import PromptDataset
from megappo.data.mixture import MixedPrompts
from megappo.data.sources import Record, read_records
from megappo.data.unknown import unknown_token_warning
from megappo.doctor.findings import Finding, any_broken, fine, from_sentence, slow
from megappo.doctor.settings import reward_model_findings
from megappo.doctor.software import reward_findings
from megappo.environments.protocol import Environment
from megappo.environments.registry import make_environment_context
from megappo.errors import one_line, shortened
from megappo.models.context import token_text
from megappo.plan.inputs import Models
from megappo.plugins import is_import_path, own_file
from megappo.ppo.assembly.components import check_answers
from megappo.ppo.assembly.methods import check_methods
from megappo.ppo.assembly.origins import open_start
from megappo.preflight.inputs import RunInputs
from megappo.rewards.processes.workers import RewardPool, RewardRequest
from megappo.rewards.registry import OF_ENVIRONMENT, check_reward

_SCORED_SAMPLES = 8
_ANSWER_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Forms of an answer that rewards understand. The finding reports the form with the best score."""
_SHOWN_CHARACTERS = 200


def prompt_findings(config: Config, models: Models, ranks: int, inputs: RunInputs) -> Iterator[Finding]:
    """Yield findings on the tokenizer, stop tokens, environment, and prompts of training and validation."""
    tokenizer, rows, stops = inputs.tokens.tokenizer, inputs.tokens.rows, inputs.tokens.stop_token_ids
    yield fine("tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer)} tokens")
    for note in thinking_notes(config, str(tokenizer.chat_template or "")):
        yield from_sentence("tokenizer", "slow", note)
    ends = ", ".join(f"{i} {token_text(tokenizer, i)!r}" for i in stops)
    notes = list(end_of_turn_notes(config, tokenizer, stops))
    yield from (from_sentence("stop tokens", "slow", note) for note in notes)
    if not notes:
        yield fine("stop tokens", ends or "none: responses have full length")
    if (environment := inputs.environment) is not None:
        make_environment_context(config, environment, tokenizer, stops, rows)
        yield _environment_finding(config, environment)
    train = inputs.training
    for prompts in train.sources if isinstance(train, MixedPrompts) else (train,):
        yield from _data_findings("data", prompts, config, tokenizer)
    epoch = len(train) / config.rollout.prompts_per_step
    steps = derive(config, ranks, models.actor, models.critic, models.reference, prompts=len(train)).steps
    if isinstance(train, MixedPrompts):
        drawn, total = steps * config.rollout.prompts_per_step, sum(train.weights)
        for name, weight, prompts in zip(train.names, train.weights, train.sources, strict=True):
            passes = float(drawn * weight / total / len(prompts))
            share = f"{steps} steps are {passes:.1f} epochs of {name}, {float(weight / total):.1%} of all prompts"
            yield fine("epochs", share)
    else:
        yield fine("epochs", f"{epoch:.1f} steps use every prompt once; {steps} steps are {steps / epoch:.1f} epochs")
    for prompts in inputs.validation.values():
        yield from _data_findings("validation", prompts, config, tokenizer)
    first = train[0]
    text, answer = (shortened(repr(shown), _SHOWN_CHARACTERS) for shown in (first.text, str(first.answer)))
    yield fine("a prompt", f"{text}, {len(first.token_ids)} tokens, answer {answer}")
    check_answers(config, train, inputs.validation.values())


def _environment_finding(config: Config, environment: Environment) -> Finding:
    """Return the finding on an environment that was created. An episode needs the weights of a model."""
    assert config.rollout.environment is not None, "the environment was created from the settings"
    file = own_file(config.rollout.environment.name)
    place = type(environment).__module__ if file is None else file.name
    tools = ", ".join(getattr(environment, "tools", {})) or "none in workers"
    rest = "no episode was played, a run with run.steps=1 plays some"
    return fine("environment", f"{type(environment).__name__} of {place}; tools: {tools}; {rest}")


def _data_findings(
    check: str, prompts: PromptDataset, config: Config, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Yield findings on the prompts of a source: their number, their lengths, and tokens that are unknown to the
    tokenizer."""
    lengths = [len(prompts[i].token_ids) for i in range(len(prompts))]
    yield fine(
        check,
        f"{len(prompts)} prompts of {prompts.source}, {prompts.dropped} dropped and {prompts.truncated} cut as too "
        f"long; {min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.0f} on average, of at most "
        f"{config.data.max_prompt_tokens}",
    )
    if unknown := unknown_token_warning(prompts, tokenizer):
        yield from_sentence(check, "slow", unknown)


def scored_findings(config: Config) -> Iterator[Finding]:
    """Yield findings on the scores of the reward function for the correct answers and for empty responses."""
    packages = list(reward_findings(config))
    yield from packages
    if any_broken(packages):
        return
    for _, term in config.reward.terms.values():
        check_reward(term)
    if config.reward.function == OF_ENVIRONMENT:
        yield fine("reward", "only the rewards that the environment returns for turns")
        return
    yield from reward_model_findings(config)
    if config.reward.function == MODEL:
        return
    servers = [judge.model for judge in config.reward.judges.values() if judge.server is not None]
    if servers:
        yield fine("reward", f"a judge, {' and '.join(servers)}, on a server that the run starts")
        return
    stop = load_tokenizer(config).eos_token or ""
    for name, source in config.data.sources.items():
        limited = source.model_copy(update={"limit": _SCORED_SAMPLES})
        best, empty, notes = _scores(config, read_records(limited), stop)
        of = f" of {name}" if name else ""
        text = f"{config.reward.summary} scores the answers{of} {best:.3g} and empty responses {empty:.3g} on average"
        yield fine("reward", text)
        if best <= empty:
            text = f"no written form of the answers{of} scores above an empty response"
            yield slow("reward", text, "inspect an example by hand")
        if notes:
            text = f"{len(notes)} texts of a judge on the answers{of} have no verdict; the first: {one_line(notes[0])}"
            yield slow("reward", text, "change the judge's prompt, pattern or max_tokens")


def _scores(config: Config, records: Sequence[Record], stop: str) -> tuple[float, float, list[str]]:
    """Return three values: the mean score of the answers in the form with the best score, the mean score of empty
    responses, and the notes of judges without a verdict on the answers. `stop` is appended to all responses."""
    with ExitStack() as open_pools:
        pools = [
            (name, weight, open_pools.enter_context(RewardPool(term.model_copy(update={"workers": 1}))))
            for name, (weight, term) in config.reward.terms.items()
            if term.function != MODEL
        ]

        def mean(form: str) -> tuple[float, list[str]]:
            answers = [form.format(record.answer) for record in records]
            requests = [
                RewardRequest(_prompt_text(record), answer, answer + stop, record.answer, record.metadata)
                for record, answer in zip(records, answers, strict=True)
            ]
            total, notes = 0.0, list[str]()
            for name, weight, pool in pools:
                own = [request for request in requests if config.reward.is_for(name, request.metadata)]
                result = pool.score(own)
                total += weight * float(result.scores.sum())
                notes += [note for _, note in result.notes]
            return total / len(requests), notes

        best, notes = max((mean(form) for form in _ANSWER_FORMS), key=lambda scored: scored[0])
        return best, mean("")[0], notes


def _prompt_text(record: Record) -> str:
    return record.prompt if isinstance(record.prompt, str) else str(record.prompt[-1]["content"])


def method_findings(config: Config) -> Iterator[Finding]:
    """Check the estimator and the policy loss on a few numbers."""
    check_methods(config)
    own = [name for name in (config.algorithm.estimator, config.algorithm.policy_loss) if is_import_path(name)]
    if own:
        yield fine("algorithm", f"{' and '.join(own)}: imported, and tested on six tokens")


def origin_findings(config: Config) -> Iterator[Finding]:
    """Yield findings on the initial weights of the models of a new run, if these weights come from another folder."""
    for role, settings in config.trained.items():
        arch = load_architecture(role_folder(config, role, weights=False), config.model)
        lora = None if settings.lora is None else settings.lora.of(arch)
        if (origin := open_start(config, role, arch, lora=lora)) is not None:
            yield fine("starts from", origin.summary)
