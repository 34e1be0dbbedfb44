"""`megappo train --dry-run`: everything of a run but training, in one process and without a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from megappo.commands import whole_option
from megappo.config import Config, ConfigError, Derived, derive, print_table
from megappo.config.base import LARGEST_WORLD
from megappo.config.chat_template import thinking_notes
from megappo.config.model_files import (
    load_architecture,
    load_tokenizer,
    model_folder,
    model_paths,
    role_folder,
)
from megappo.config.reward import MODEL
from megappo.config.tokens import decoded
from megappo.data import PromptDataset
from megappo.data.mixture import MixedPrompts
from megappo.data.sources import Record, read_records
from megappo.data.unknown import unknown_words
from megappo.doctor.findings import Finding
from megappo.doctor.machine import disk
from megappo.doctor.software import generation_finding, reward_findings
from megappo.environments.registry import make_environment_context
from megappo.errors import RunError, one_line, raised_by_megappo, shortened
from megappo.observe.loggers import find_logger
from megappo.plan.engines import other_engine
from megappo.plan.here import this_machine
from megappo.plan.inputs import Models
from megappo.plan.machine_file import find_machine
from megappo.plan.machines import Machine
from megappo.plan.planner import default_machine, make_plan
from megappo.plan.rewards import reward_parameters
from megappo.plan.search import remedy
from megappo.plugins import is_import_path
from megappo.ppo.methods import check_methods
from megappo.ppo.origins import open_origin
from megappo.ppo.parts import check_answers
from megappo.preflight.inputs import read_inputs
from megappo.preflight.resolved import outline_run
from megappo.reshard.sources import SafetensorsSource
from megappo.rewards.model import check_folder
from megappo.rewards.registry import OF_ENVIRONMENT, check_reward
from megappo.rewards.workers import RewardPool, RewardRequest

_SCORED_SAMPLES = 8
_ANSWER_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Forms of an answer that rewards understand; the best of them is reported."""
_SHOWN_CHARACTERS = 200

Rows = Iterator[tuple[str, str]]
"""(name, what was found) as they are printed."""


def dry_run(
    config: Config,
    config_path: str,
    overrides: Sequence[str],
    *,
    gpus_text: str | None = None,
    machine_name: str | None = None,
) -> None:
    """Load tokenizer and data, score samples, look through the weights, plan; print what would run.

    Raises ConfigError with every problem, not only the first.
    """
    given, machine = config, this_machine() if machine_name is None else find_machine(machine_name)
    gpus = None if gpus_text is None else whole_option("--gpus", gpus_text, 1, LARGEST_WORLD)
    on_cuda = None if machine_name is None else machine.is_cuda
    outline = outline_run(config, config_path, world_size=gpus, on_cuda=on_cuda)
    config, models, derived = outline.config, outline.models, outline.derived
    ranks = derived.world_size
    print_table(config, derived)
    problems: list[str] = []
    for part in (
        _prompts(config, models, ranks),
        _reward(config),
        _methods(config),
        _weights(config),
        _origins(config),
        _machine(config),
        _plan(config, models, ranks, machine) if machine_name else _plan_unnamed(given, models, ranks, machine),
    ):
        problems += _print_part(part)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    _print("would run", _command(config_path, overrides, derived))
    _print("dry run", "nothing was trained and nothing is left on the disk")


def _print(name: str, words: str) -> None:
    print(f"{name:<12} {words}", flush=True)


def _print_part(part: Rows) -> tuple[str, ...]:
    """Print a part's rows as they come; returns the problem that ended it, if one did."""
    try:
        for name, words in part:
            _print(name, words)
    except ConfigError as error:
        return error.problems
    except RunError as error:
        return (str(error),)
    except ValueError as error:
        if not raised_by_megappo(error):
            raise
        return (one_line(str(error)),)
    return ()


def _prompts(config: Config, models: Models, ranks: int) -> Rows:
    """Tokenizer, prompts of training and validation, stop tokens."""
    inputs = read_inputs(config, validation=True)
    tokenizer, rows, stops = inputs.tokens.tokenizer, inputs.tokens.rows, inputs.tokens.stop_token_ids
    yield "tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer)} tokens"
    for note in thinking_notes(config, str(tokenizer.chat_template or "")):
        yield "tokenizer", note
    yield (
        "stop tokens",
        ", ".join(f"{i} {decoded(tokenizer, [i])!r}" for i in stops) or "none: responses have full length",
    )
    if (environment := inputs.environment) is not None:
        make_environment_context(config, environment, tokenizer, stops, rows)
        tools = ", ".join(getattr(environment, "tools", {})) or "none in workers"
        yield "environment", f"{type(environment).__name__} of {type(environment).__module__}; tools: {tools}"
    train = inputs.training
    for prompts in train.sources if isinstance(train, MixedPrompts) else (train,):
        yield "data", _data_words(prompts, config)
        if unknown := unknown_words(prompts, tokenizer):
            yield "data", unknown
    epoch = len(train) / config.rollout.prompts_per_step
    steps = derive(config, ranks, models.actor, models.critic, models.reference, prompts=len(train)).steps
    if isinstance(train, MixedPrompts):
        drawn, total = steps * config.rollout.prompts_per_step, sum(train.weights)
        for name, weight, prompts in zip(train.names, train.weights, train.sources, strict=True):
            passes = float(drawn * weight / total / len(prompts))
            yield "epochs", f"{steps} steps are {passes:.1f} of {name}, {float(weight / total):.1%} of all prompts"
    else:
        yield "epochs", f"{epoch:.1f} steps take every prompt once; {steps} steps are {steps / epoch:.1f}"
    for prompts in inputs.validation.values():
        yield "validation", _data_words(prompts, config)
        if unknown := unknown_words(prompts, tokenizer):
            yield "validation", unknown
    first = train[0]
    text, answer = (shortened(repr(shown), _SHOWN_CHARACTERS) for shown in (first.text, str(first.answer)))
    yield "a prompt", f"{text}, {len(first.token_ids)} tokens, answer {answer}"
    check_answers(config, train, inputs.validation.values())


def _data_words(prompts: PromptDataset, config: Config) -> str:
    lengths = [len(prompts[i].token_ids) for i in range(len(prompts))]
    return (
        f"{len(prompts)} prompts of {prompts.source}, {prompts.dropped} dropped and {prompts.truncated} cut as too "
        f"long; {min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.0f} in the mean, of at most "
        f"{config.data.max_prompt_tokens}"
    )


def _reward(config: Config) -> Rows:
    """The reward function on samples: the answers themselves, and nothing at all."""
    for finding in reward_findings(config):
        _refuse_broken(finding)
    for _, term in config.reward.terms.values():
        check_reward(term)
    if config.reward.function == OF_ENVIRONMENT:
        yield "reward", "what the environment gives for turns, and nothing else"
        return
    if config.reward.model_path is not None:
        folder = model_folder(config.reward.model_path, weights=False, key="reward.model_path")
        check_folder(str(folder), trust_remote_code=config.model.trust_remote_code)
        count = reward_parameters(config.reward.model_path)
        holder = config.reward.model_holder
        yield "reward", f"the model in {config.reward.model_path}, {count:,} weights, which {holder}"
        if config.reward.function == MODEL:
            return
    servers = [judge.model for judge in config.reward.judges.values() if judge.server is not None]
    if servers:
        yield "reward", f"a judge, {' and '.join(servers)}, whose server the run starts"
        return
    stop = load_tokenizer(config).eos_token or ""
    for name, source in config.data.sources.items():
        limited = source.model_copy(update={"limit": _SCORED_SAMPLES})
        best, empty = _scores(config, read_records(limited), stop)
        of = f" of {name}" if name else ""
        yield (
            "reward",
            f"{config.reward.words} gives the answers{of} {best:.3g} and empty responses {empty:.3g}, in the mean",
        )
        if best <= empty:
            yield "reward", f"no written form of the answers{of} scores above an empty response: look at one by hand"


def _scores(config: Config, records: Sequence[Record], stop: str) -> tuple[float, float]:
    """Mean score of the answers, in the form that scores best, and of empty responses; `stop` ends all."""
    with ExitStack() as open_pools:
        pools = [
            (name, weight, open_pools.enter_context(RewardPool(term.model_copy(update={"workers": 1}))))
            for name, (weight, term) in config.reward.terms.items()
            if term.function != MODEL
        ]

        def mean(form: str) -> float:
            answers = [form.format(record.answer) for record in records]
            requests = [
                RewardRequest(_prompt_text(record), answer, answer + stop, record.answer, record.metadata)
                for record, answer in zip(records, answers, strict=True)
            ]
            total = 0.0
            for name, weight, pool in pools:
                own = [request for request in requests if config.reward.is_for(name, request.metadata)]
                total += weight * float(pool.score(own).scores.sum())
            return total / len(requests)

        return max(mean(form) for form in _ANSWER_FORMS), mean("")


def _prompt_text(record: Record) -> str:
    return record.prompt if isinstance(record.prompt, str) else str(record.prompt[-1]["content"])


def _methods(config: Config) -> Rows:
    """Estimator and policy loss, tried on a few numbers, and loggers, which are not made."""
    check_methods(config)
    own = [name for name in (config.algorithm.estimator, config.algorithm.policy_loss) if is_import_path(name)]
    if own:
        yield "algorithm", f"{' and '.join(own)}: imported, and tried on six tokens"
    for path, options in config.logging.loggers.items():
        find_logger(path, options)
        yield "logger", f"{path}: imported, and takes its options"


def _weights(config: Config) -> Rows:
    """Check that the files have every tensor of every model, by their headers."""
    for role, path in model_paths(config).items():
        if config.model.init == "random":
            yield "weights", f"{role}: drawn from the seed; model.init is random"
            continue
        if not Path(path).is_dir():
            yield "weights", f"{role}: {path} is fetched from the hub by the run, and not looked at here"
            continue
        folder = Path(path)
        arch = load_architecture(folder, config.model)
        source = SafetensorsSource(folder, arch)
        count = source.check(with_output_layer=role != "critic")
        kind = "float8" if arch.stored_blocks else "MXFP4" if arch.stored_mxfp4 else ""
        stored = f" and {kind} weights have their scales" if kind else ""
        if role == "actor" and source.further:
            stored += f"; {len(source.further)} of layers that predict further tokens are kept for exports"
        yield "weights", f"{role}: all {count} tensors are in {folder}, in the shapes of its config.json{stored}"


def _origins(config: Config) -> Rows:
    """Weights that the models of a new run start from, where these are not those of their own folder."""
    for role, settings in config.trained.items():
        if settings.start_from is not None:
            arch = load_architecture(role_folder(config, role, weights=False), config.model)
            lora = None if settings.lora is None else settings.lora.of(arch)
            yield "starts from", open_origin(settings.start_from, role, arch, lora=lora).words


def _machine(config: Config) -> Rows:
    """What the run needs of this machine's software and disk."""
    for finding in (generation_finding(config), *disk(config.run.path)):
        _refuse_broken(finding)
        yield finding.check, finding.words


def _refuse_broken(finding: Finding) -> None:
    if finding.state == "broken":
        raise ConfigError(f"{finding.words}; {finding.remedy}")


def _plan(config: Config, models: Models, ranks: int, machine: Machine) -> Rows:
    """Memory and time on a machine that was named, on which the run must fit."""
    plan = make_plan(config, models, machine, ranks)
    if not plan.fits:
        raise ConfigError(f"{plan.verdict}; {remedy(config, models, machine, ranks)[0]}")
    yield from _plan_rows(config, models, ranks, machine, f"{ranks} x {machine.words}")


def _plan_unnamed(config: Config, models: Models, ranks: int, here: Machine) -> Rows:
    """Memory and time on this machine; a run that does not fit here is planned for GPUs of the table too, and not
    refused."""
    needs_gpus = config.runtime.device == "cuda" and not here.is_cuda
    if not needs_gpus:
        of_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
        where = f"{ranks} x {here.words}" if here.is_cuda else f"{of_ranks} on {here.words}"
        try:
            plan = make_plan(config, models, here, ranks)
        except ConfigError as error:
            yield "plan", f"{where}: does not fit: {error}"
        else:
            if plan.fits:
                yield from _plan_rows(config, models, ranks, here, where)
                return
            yield "plan", f"{where}: {plan.verdict}"
    elsewhere = default_machine(config)
    where = f"{ranks} x {elsewhere.words}{'' if needs_gpus else ' instead'}"
    yield from _plan_rows(config, models, ranks, elsewhere, where)
    yield "plan", "another machine is named with --machine"


def _plan_rows(config: Config, models: Models, ranks: int, machine: Machine, where: str) -> Rows:
    plan = make_plan(config, models, machine, ranks)
    yield "plan", f"{where}: {plan.verdict}"
    yield "plan", plan.bottleneck
    yield "plan", other_engine(config, models, machine, ranks).sentence
    if not plan.fits:
        yield "plan", remedy(config, models, machine, ranks)[0]


def _command(config_path: str, overrides: Sequence[str], derived: Derived) -> str:
    words = shlex.join(["-m", "megappo", "train", config_path, *overrides])
    return f"torchrun --nproc-per-node {derived.world_size} {words}, or as many ranks over several machines"
