"""Rules for servers: the kind of the engine, other settings, the model and the sizes of a server's parallel groups."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.rollout import RolloutSettings
from megappo.config.rules.layouts import valid_tensor_parallel
from megappo.config.schema import Config
from megappo.config.sections.engine import SERVERS, ServerSettings
from megappo.config.sections.server_words import word_rules
from megappo.errors import divisors, either, nearest_numbers
from megappo.families import FAMILIES
from megappo.families.architecture import ModelShape
from megappo.families.declaration import ArchitectureConfig


def server_rules(config: Config, shape: ModelShape) -> Iterator[str]:
    """Check that the settings of servers fit the engine, other settings and the actor's model. `resolve` must have
    chosen the engine. The options and the models of a custom engine are unknown and are not checked."""
    rollout, servers = config.rollout, config.rollout.servers
    if rollout.engine_name is None or rollout.load_from is not None:
        return
    if rollout.capabilities.separate_processes != (servers is not None):
        yield _setting_of(rollout)
    if servers is None:
        return
    if rollout.when_stopped == "keep" and servers.deterministic is False:
        yield (
            "rollout.when_stopped is keep and rollout.servers.deterministic is false, so short responses are kept, "
            "long responses are sampled again, and responses get shorter; set when_stopped to drop, or deterministic "
            "to true"
        )
    yield from _node_rules(servers)
    if servers.is_built_in:
        yield from _model_rules(config, servers, shape)


def _setting_of(rollout: RolloutSettings) -> str:
    """Return a sentence on an engine that the wrong setting names."""
    if rollout.servers is None:
        return f"{rollout.engine_text} runs in separate processes; set rollout.servers.kind instead of rollout.engine"
    return (
        f"{rollout.engine_text} does not run in separate processes; set rollout.engine instead "
        "of rollout.servers, or set `separate_processes` in its capabilities"
    )


def _model_rules(config: Config, servers: ServerSettings, shape: ModelShape) -> Iterator[str]:
    """Check that the servers can have the model and its weights."""
    rollout, label = config.rollout, SERVERS[servers.kind].label
    if rollout.dtype not in (None, config.model.dtype):
        yield (
            f"rollout.dtype is {rollout.dtype}, but {label} uses the actor's tensors without conversion; "
            f"set it to model.dtype {config.model.dtype}, or remove it"
        )
    tp, heads = servers.tensor_parallel, servers.attention_ranks
    unfit = [f"{shape.heads} (heads)"] if shape.heads % heads else []
    unfit += [f"{shape.ffn_hidden_size} (FFN hidden size)"] if not shape.experts and shape.ffn_hidden_size % tp else []
    if shape.delta_net is not None and shape.delta_net.key_heads % heads:
        unfit.append(f"{shape.delta_net.key_heads} (key heads of linear attention)")
    if shape.kv_heads % heads and heads % shape.kv_heads:
        unfit.append(f"{shape.kv_heads} (KV heads)")
    if unfit:
        nearest = nearest_numbers(tp, valid_tensor_parallel(shape))
        yield f"rollout.servers.tensor_parallel {tp} does not divide {either(unfit)}; the nearest is {nearest}"
    if isinstance(shape, ArchitectureConfig) and not shape.declaration.fingerprinted and servers.verify:
        yield (
            f"rollout.servers.verify is true, but {label} stores the weights of a {shape.family} in a different "
            "order, so checksums cannot be compared; set verify to false"
        )
    yield from word_rules(servers)
    yield from _attention_rules(servers, shape)
    yield from _expert_rules(servers, shape)
    drafts = servers.arguments.get("speculative-algorithm", "NGRAM")
    if drafts != "NGRAM":  # NGRAM drafts tokens without weights
        yield (
            f"rollout.servers.arguments has speculative-algorithm {drafts}, but a run sends only the actor's weights "
            "and no weights of draft layers; remove it"
        )


def _attention_rules(servers: ServerSettings, shape: ModelShape) -> Iterator[str]:
    """Check `data_parallel_attention`. The servers must support the option for the model, and each rank must have a
    known part of the weights."""
    tp, groups, key = (
        servers.tensor_parallel,
        servers.data_parallel_attention,
        "rollout.servers.data_parallel_attention",
    )
    if groups == 1:
        return
    if tp % groups:
        nearest = nearest_numbers(groups, divisors(tp))
        yield f"{key} {groups} does not divide tensor_parallel {tp}; the nearest is {nearest}"
    able = [name for name, family in FAMILIES.items() if family.attends_in_groups]
    if shape.family not in able:
        label = SERVERS[servers.kind].label
        yield f"{key} is {groups}, which {label} supports for {either(able)}, but not for {shape.family}; set it to 1"
    elif shape.tied_embeddings:
        yield f"{key} is {groups}, but the model's embedding is its output layer, which other ranks share; set it to 1"


def _node_rules(servers: ServerSettings) -> Iterator[str]:
    """Check that `nodes` divides a server's ranks evenly."""
    tp, nodes = servers.tensor_parallel, servers.nodes
    if tp % nodes:
        nearest = nearest_numbers(nodes, divisors(tp))
        yield f"rollout.servers.nodes {nodes} does not divide tensor_parallel {tp}; the nearest is {nearest}"


def _expert_rules(servers: ServerSettings, shape: ModelShape) -> Iterator[str]:
    """Check that a server's ranks divide the experts and the matrices of each expert evenly, so that each rank has a
    known part of the weights."""
    tp, ep, key = servers.tensor_parallel, servers.expert_parallel, "rollout.servers.expert_parallel"
    if ep > 1 and not shape.experts:
        yield f"{key} {ep}, but the actor model has no experts; set it to 1"
    elif tp % ep or shape.experts % ep:
        nearest = nearest_numbers(ep, [n for n in divisors(tp) if not shape.experts % n])
        experts = f" and {shape.experts} (experts)" if shape.experts % ep else ""
        yield f"{key} {ep} does not divide rollout.servers.tensor_parallel {tp}{experts}; the nearest is {nearest}"
    elif shape.experts and shape.ffn_hidden_size % (tp // ep):
        fitting = [n for n in divisors(tp) if not shape.experts % n and not shape.ffn_hidden_size % (tp // n)]
        remedy = f"the nearest is {nearest_numbers(ep, fitting)}" if fitting else "lower tensor_parallel"
        yield (
            f"{key} {ep} splits each expert between {tp // ep} ranks, which do not divide the {shape.ffn_hidden_size} "
            f"(FFN hidden size) of an expert; {remedy}"
        )
