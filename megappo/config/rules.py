"""Rules between sections, the models and the world size.

Each function yields a sentence per broken rule: the dotted key with its value, the rule, the nearest valid value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.algo.estimators import NAMES, builtin
from megappo.config import expert_rules, metric_rules, server_topology_rules
from megappo.config.engine import ENGINES
from megappo.config.estimator_rules import estimator_rules
from megappo.config.roles import ActorSettings, CriticSettings, LayoutSettings
from megappo.config.schema import Config
from megappo.config.server_words import word_rules
from megappo.errors import divisors, either, nearest_numbers, show
from megappo.families.architecture import ArchitectureConfig, ModelShape, padded_vocab_size


@dataclass(frozen=True)
class RoleSpec:
    """A trained role's name in the YAML file, its settings and its model."""

    name: str
    settings: ActorSettings | CriticSettings
    shape: ModelShape

    @property
    def layout(self) -> LayoutSettings:
        """The role's parallel layout."""
        return self.settings.layout


def algorithm_rules(config: Config) -> Iterator[str]:
    """Rules on what the algorithm needs of the other sections; nothing of the user's code is imported."""
    if config.algorithm.estimator in NAMES:
        yield from estimator_rules(config, builtin(config.algorithm.estimator))
    has_kl = config.algorithm.kl_in_reward is not None or config.algorithm.kl_in_loss is not None
    if has_kl and config.reference is None:
        term = "kl_in_reward" if config.algorithm.kl_in_reward is not None else "kl_in_loss"
        yield f"algorithm.{term} needs a reference policy; add `reference: {{}}` or set algorithm.{term} to null"
    if config.reference is not None and not has_kl:
        yield (
            "reference is given but no KL term uses it; add algorithm.kl_in_reward or algorithm.kl_in_loss, "
            "or remove it (reference=null)"
        )
    kl, samples = config.algorithm.kl_in_reward, config.rollout.batch_sequences
    if kl is not None and kl.controller == "adaptive" and samples > kl.horizon:
        yield (
            f"algorithm.kl_in_reward.horizon {kl.horizon} must be at least the {samples} samples of a step, over which "
            f"the weight is to move by no more than a fifth; set it to {samples} or more"
        )


_MOST_NATS_PER_TOKEN, _LEAST_NATS_PER_RESPONSE = 1.0, 0.1
"""Largest sensible target per token, smallest per response: a policy above the first has left its reference, and one
held below the second cannot move."""


def kl_target_notes(config: Config) -> Iterator[str]:
    """A note on a target of the adaptive KL that is plausible only in the other unit."""
    kl = config.algorithm.kl_in_reward
    if kl is None or kl.controller != "adaptive":
        return
    target, key = kl.target_nats, "algorithm.kl_in_reward"
    if kl.per == "token" and target > _MOST_NATS_PER_TOKEN:
        yield (
            f"{key}.target {target:g} is in nats per token, where a policy near its reference stays below "
            f"{_MOST_NATS_PER_TOKEN:g}; set {key}.per: response if it is meant per response, or leave the target out"
        )
    if kl.per == "response" and target < _LEAST_NATS_PER_RESPONSE:
        yield (
            f"{key}.target {target:g} is in nats per response, which below {_LEAST_NATS_PER_RESPONSE:g} holds the "
            f"policy still; set {key}.per: token if it is meant per token, or leave the target out"
        )


def section_rules(config: Config, steps: int | None) -> Iterator[str]:
    """Rules between sections other than the algorithm; `steps` of the run, None where not known."""
    if config.evaluation is not None and not config.data.evaluated:
        yield (
            "evaluation is given but there is nothing to evaluate on; add data.validation or data.validation_sets, or "
            "set evaluation to null"
        )
    if config.critic is not None and steps is not None and config.critic.warmup_steps > steps:
        which = f"run.steps {steps}" if config.run.epochs is None else f"the {steps} steps of run.epochs"
        yield (
            f"critic.warmup_steps {config.critic.warmup_steps} is above {which}; set {steps} to train the critic "
            "alone, or fewer to train the actor after it"
        )
    if config.checkpoint is None and not config.run.export_final_model:
        yield (
            "checkpoint is null and run.export_final_model is false, so nothing would be left of what was trained; "
            "set one of them"
        )
    reference = config.reference
    if reference is not None and config.model.init == "random" and config.actor.start_from is not None:
        yield (
            "reference would be drawn at random by model.init, while the actor begins with actor.start_from; "
            "set model.path to a folder with weights and model.init to pretrained, or reference to null"
        )
    yield from metric_rules.keep_best_rules(config, steps)
    if config.checkpoint is None and config.run.max_hours is not None:
        yield (
            f"run.max_hours {config.run.max_hours:g} stops the run with a checkpoint, and checkpoint is null; remove "
            "either of them"
        )
    directory = config.runtime.offload_directory
    if directory is not None and not directory.is_dir():
        yield (
            f"runtime.offload_directory '{directory}' is not a folder (from {Path.cwd()}); make it, or leave it out "
            "for the system's temporary folder"
        )


def placement_rules(role: RoleSpec, world_size: int) -> Iterator[str]:
    """Rules on a role's ranks: they lie in the world and hold whole copies of its model."""
    layout, key = role.layout, f"{role.name}.layout"
    if layout.first_rank >= world_size:
        yield (
            f"{key}.first_rank {layout.first_rank} is outside the world of {world_size} ranks; "
            f"set at most {world_size - 1}, or start more processes"
        )
        return
    grid = layout.grid(world_size)
    ranks = grid.ranks
    if ranks[-1] >= world_size:
        yield (
            f"{key}.first_rank {layout.first_rank} + ranks {len(ranks)} = {ranks[-1] + 1} is above the world size "
            f"{world_size}; set {key}.ranks to {world_size - layout.first_rank}, or start {ranks[-1] + 1} processes"
        )
    if len(ranks) % layout.context_parallel:
        nearest = nearest_numbers(layout.context_parallel, divisors(len(ranks)))
        yield (
            f"{key}.context_parallel {layout.context_parallel} does not divide its {len(ranks)} ranks; "
            f"the nearest is {nearest}"
        )
    elif len(ranks) % grid.model_ranks:
        sizes = f"context_parallel {layout.context_parallel} x " if layout.context_parallel > 1 else ""
        sizes += f"tensor_parallel {layout.tensor_parallel} x pipeline_parallel {layout.pipeline_parallel}"
        yield (
            f"{key}.{sizes} = {grid.model_ranks} does not divide its {len(ranks)} ranks; the nearest layouts are "
            f"{_nearest_layouts(role, len(ranks) // layout.context_parallel)}"
        )
    elif len(ranks) // layout.pipeline_parallel % layout.expert_parallel:
        stage = len(ranks) // layout.pipeline_parallel
        nearest = nearest_numbers(layout.expert_parallel, [n for n in divisors(stage) if not role.shape.experts % n])
        yield (
            f"{key}.expert_parallel {layout.expert_parallel} does not divide the {stage} ranks of a pipeline stage; "
            f"the nearest is {nearest}"
        )


def coverage_rules(roles: Iterable[RoleSpec], world_size: int) -> Iterator[str]:
    """Rule on all roles together: every rank of the world belongs to one."""
    roles = list(roles)
    covered = {rank for role in roles for rank in role.layout.grid(world_size).ranks}
    idle = [rank for rank in range(world_size) if rank not in covered]
    if not idle:
        return
    layouts = either(f"{role.name}.layout (ranks {format_ranks(role.layout.grid(world_size).ranks)})" for role in roles)
    how = "lower its first_rank" if idle[0] < min(covered) else "`ranks: null` takes all from first_rank"
    remedy = f"widen {layouts}: {how}"
    if idle[0] == len(covered):
        remedy += f", or start {len(covered)} {'process' if len(covered) == 1 else 'processes'}"
    yield f"{rank_words(idle)} of the world size {world_size} would stay idle; {remedy}"


def parallel_rules(role: RoleSpec, model_name: str) -> Iterator[str]:
    """Rules on a role's tensor and pipeline parallel sizes: they fit its model; `model_name` is `actor`, `critic` or
    `reference`."""
    layout, shape, key = role.layout, role.shape, f"{role.name}.layout"
    tp, pp, vpp = layout.tensor_parallel, layout.pipeline_parallel, layout.virtual_pipeline_chunks
    unfit = [f"{size} ({name})" for name, size in shape.shared_sizes.items() if size % tp]
    if unfit:
        nearest = nearest_numbers(tp, valid_tensor_parallel(shape))
        sizes_words = f"{either(unfit)} of the {model_name} model"
        yield f"{key}.tensor_parallel {tp} does not divide {sizes_words}; the nearest is {nearest}"
    if layout.sequence_parallel and tp == 1:
        remedy = "remove it, or set tensor_parallel to 2"
        yield f"{key}.sequence_parallel needs tensor_parallel above 1; {remedy}"
    if vpp > 1 and pp == 1:
        yield (
            f"{key}.virtual_pipeline_chunks {vpp} needs pipeline_parallel above 1; "
            "set virtual_pipeline_chunks to 1 or pipeline_parallel to 2"
        )
    elif shape.layers < pp * vpp:
        yield (
            f"{key}.pipeline_parallel {pp} x virtual_pipeline_chunks {vpp} = {pp * vpp} chunks are more than the "
            f"{shape.layers} layers of the {model_name} model; the nearest are "
            f"{_nearest_pipelines(pp, vpp, shape.layers)}"
        )
    elif isinstance(layout.pipeline_layers, tuple):
        yield from _layer_list_rules(role, layout.pipeline_layers, model_name)
    if shape.delta_net is not None and layout.context_parallel > 1:
        yield (
            f"{key}.context_parallel {layout.context_parallel} shares out the tokens of a sample, whose states pass "
            f"from token to token in the linear attention of a {shape.family}; set it to 1, and tensor_parallel higher"
        )
    yield from expert_rules.layout_rules(role, model_name)
    yield from _recompute_rules(role, model_name)


def _layer_list_rules(role: RoleSpec, given: tuple[int, ...], model_name: str) -> Iterator[str]:
    """Rules on a list of layers: it has an entry for each chunk, and all layers of the model in it."""
    layout, key = role.layout, f"{role.name}.layout"
    pp, vpp = layout.pipeline_parallel, layout.virtual_pipeline_chunks
    if len(given) != pp * vpp:
        yield (
            f"{key}.pipeline_layers {show(list(given))} has {len(given)} entries, must have one for each of the "
            f"pipeline_parallel {pp} x virtual_pipeline_chunks {vpp} = {pp * vpp} chunks; give {pp * vpp}, or set it "
            "to auto"
        )
    elif sum(given) != role.shape.layers:
        yield (
            f"{key}.pipeline_layers {show(list(given))} has {sum(given)} layers, must have the {role.shape.layers} of "
            f"the {model_name} model; change its entries, or set it to auto"
        )


def _recompute_rules(role: RoleSpec, model_name: str) -> Iterator[str]:
    """Rules on recomputation: its modules are parts of the model's layers."""
    settings = role.settings
    absent, present = ("mlp", "moe") if role.shape.experts else ("moe", "mlp")
    if settings.recompute == "selective" and not settings.recompute_modules:
        yield f"{role.name}.recompute is selective and recompute_modules empty; set recompute to none, or name a module"
    if settings.recompute == "selective" and absent in settings.recompute_modules:
        yield (
            f"{role.name}.recompute_modules has {absent}, which layers of the {model_name} model do not have; "
            f"write {present}"
        )


def vocabulary_rules(config: Config, roles: Iterable[RoleSpec]) -> Iterator[str]:
    """Rules on padding of the vocabulary: tensor parallel ranks divide it evenly."""
    multiple = config.model.pad_vocab_to_multiple_of
    if multiple == 1:
        return
    roles = list(roles)
    common = math.lcm(*(role.layout.tensor_parallel for role in roles))
    for role in roles:
        tp = role.layout.tensor_parallel
        padded = padded_vocab_size(role.shape.vocab_size, tp, multiple)
        if padded % tp:
            below, above = multiple // common * common, -(-multiple // common) * common
            yield (
                f"model.pad_vocab_to_multiple_of {multiple} pads the vocabulary to {padded}, which "
                f"{role.name}.layout.tensor_parallel {tp} does not divide; the nearest is "
                f"{nearest_numbers(multiple, [n for n in (1, below, above) if n > 0])}"
            )


def length_rules(config: Config, shapes: dict[str, ModelShape]) -> Iterator[str]:
    """Rules on lengths: prompt and response fit every model's positions; `shapes` is keyed by the model's name in
    sentences."""
    lengths = {"rollout": config.rollout.max_response_tokens}
    if config.evaluation is not None and config.evaluation.max_response_tokens is not None:
        lengths["evaluation"] = config.evaluation.max_response_tokens
    prompt = config.data.max_prompt_tokens
    for name, shape in shapes.items():
        room = shape.max_position_embeddings
        for section, response in lengths.items():
            if config.rollout.total_tokens(prompt, response) > room:
                fits = room - prompt
                remedy = f"set {section}.max_response_tokens to at most {fits}" if fits > 0 else "shorten both"
                yield (
                    f"data.max_prompt_tokens {prompt} + {section}.max_response_tokens {response} = {prompt + response} "
                    f"is above max_position_embeddings {room} of the {name} model; {remedy}"
                )


def kept_rules(config: Config) -> Iterator[str]:
    """Rules on generation functions, dynamic sampling and shaping of scores: each can take effect with the other
    settings."""
    rollout, overlong = config.rollout, config.reward.overlong
    if rollout.generation is not None and (rollout.ahead or rollout.episodes is not None):
        other = f"rollout.ahead is {rollout.ahead}" if rollout.ahead else "rollout.environment plays episodes"
        remedy = "rollout.ahead to 0" if rollout.ahead else "rollout.environment to null"
        yield f"rollout.generation is given, but {other}, which does without it; set {remedy}, or generation to null"
    if rollout.dynamic_sampling is not None and rollout.samples_per_prompt < 2:
        yield (
            f"rollout.dynamic_sampling compares the samples of a prompt, but rollout.samples_per_prompt is "
            f"{rollout.samples_per_prompt}; set it to at least 2, or dynamic_sampling to null"
        )
    if config.reward.is_rescaled and rollout.episodes is not None:
        yield (
            "reward.normalize, scale, shift and clip are for the scores of functions, but rollout.environment gives "
            "rewards of its own; scale them there, and remove these"
        )
    if overlong is not None and overlong.buffer_tokens > rollout.max_response_tokens:
        yield (
            f"reward.overlong.buffer_tokens {overlong.buffer_tokens} is above rollout.max_response_tokens "
            f"{rollout.max_response_tokens}; set it to at most that"
        )


def engine_rules(config: Config) -> Iterator[str]:
    """Rules on `rollout.ahead`: the engine has processes of its own, and samples of older weights are importance
    weighted."""
    rollout = config.rollout
    answered = rollout.replays_arrivals or rollout.load_from is not None
    if rollout.ahead and rollout.engine == "transformers" and not answered:
        ahead, engine = rollout.ahead, rollout.engine
        yield f"rollout.ahead is {ahead}, but the engine '{engine}' has no processes of its own; set it to 0"
    elif rollout.ahead and config.algorithm.old_logprob == "decoupled":
        yield (
            f"rollout.ahead is {rollout.ahead}, so older weights than the actor's sample, which algorithm.old_logprob "
            "'decoupled' takes no account of; set it to corrected or bypass, or rollout.ahead to 0"
        )


def server_rules(config: Config, shape: ModelShape) -> Iterator[str]:
    """Rules on what SGLang servers need of the other settings and of the actor's model, once `resolve` has chosen the
    engine."""
    rollout = config.rollout
    if rollout.engine is None or rollout.load_from is not None:
        return
    if not rollout.has_servers:
        if rollout.sglang is not None:
            default = ", which is the default without CUDA" if rollout.engine in ENGINES else ""
            yield (
                f"rollout.sglang is given but rollout.engine is '{rollout.engine}'{default}; "
                "set rollout.engine to sglang, or remove rollout.sglang"
            )
        return
    if rollout.dtype not in (None, config.model.dtype):
        yield (
            f"rollout.dtype is {rollout.dtype}, but SGLang takes the actor's tensors as they are; "
            f"set it to model.dtype {config.model.dtype}, or remove it"
        )
    if rollout.when_stopped == "keep" and rollout.servers.deterministic is False:
        yield (
            "rollout.when_stopped is keep and rollout.sglang.deterministic false, which keeps the short responses and "
            "samples the long ones anew, which makes them shorter; set when_stopped to drop, or deterministic to true"
        )
    tp, heads = rollout.servers.tensor_parallel, rollout.servers.attention_ranks
    unfit = [f"{shape.heads} (heads)"] if shape.heads % heads else []
    unfit += [f"{shape.ffn_hidden_size} (FFN hidden size)"] if not shape.experts and shape.ffn_hidden_size % tp else []
    if shape.delta_net is not None and shape.delta_net.key_heads % heads:
        unfit.append(f"{shape.delta_net.key_heads} (key heads of linear attention)")
    if shape.kv_heads % heads and heads % shape.kv_heads:
        unfit.append(f"{shape.kv_heads} (KV heads)")
    if unfit:
        nearest = nearest_numbers(tp, valid_tensor_parallel(shape))
        yield f"rollout.sglang.tensor_parallel {tp} does not divide {either(unfit)}; the nearest is {nearest}"
    if isinstance(shape, ArchitectureConfig) and not shape.declaration.fingerprinted and rollout.servers.verify:
        yield (
            f"rollout.sglang.verify is true, but SGLang has the weights of a {shape.family} in an order of its own, "
            "which cannot be compared with what was sent; set it to false"
        )
    yield from word_rules(rollout.servers)
    yield from server_topology_rules.node_rules(rollout.servers)
    yield from server_topology_rules.attention_rules(rollout.servers, shape)
    yield from expert_rules.server_rules(rollout.servers, shape)
    drafts = rollout.servers.arguments.get("speculative-algorithm", "NGRAM")
    if drafts != "NGRAM":  # NGRAM drafts tokens without weights
        yield (
            f"rollout.sglang.arguments has speculative-algorithm {drafts}, but a run sends its servers the actor's "
            "weights, and none of layers that draft tokens; remove it"
        )


def format_ranks(ranks: Iterable[int]) -> str:
    """`0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


def rank_words(ranks: Sequence[int]) -> str:
    """`rank 6`, `ranks 0-3, 6`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


def valid_tensor_parallel(shape: ModelShape) -> list[int]:
    """Tensor parallel sizes of a role with such a model, ascending."""
    return divisors(math.gcd(*shape.shared_sizes.values()))


def _nearest_layouts(role: RoleSpec, ranks: int) -> str:
    """The two tensor x pipeline sizes nearest to the role's that divide so many ranks and fit its model."""
    tp, pp = role.layout.tensor_parallel, role.layout.pipeline_parallel
    fitting = [
        (t, p) for t in valid_tensor_parallel(role.shape) for p in divisors(role.shape.layers) if ranks % (t * p) == 0
    ]
    return _nearest_pairs((tp, pp), fitting)


def _nearest_pipelines(pp: int, vpp: int, layers: int) -> str:
    """The two pipeline x chunk sizes nearest to the given ones that leave a layer for each chunk."""
    sizes = [(p, v) for p in range(1, layers + 1) for v in range(1, layers // p + 1)]
    fitting = [(p, v) for p, v in sizes if v == 1 or (p > 1 and vpp > 1)]
    return _nearest_pairs((pp, vpp), fitting)


def _nearest_pairs(wanted: tuple[int, int], choices: Iterable[tuple[int, int]]) -> str:
    """`2 x 1 or 1 x 2`: the two choices that change least."""
    nearest = sorted(choices, key=lambda pair: (sum(abs(a - b) for a, b in zip(pair, wanted, strict=True)), pair))
    return either(f"{first} x {second}" for first, second in nearest[:2])
