"""Rules for SGLang servers: other settings, the model and the sizes of a server's parallel groups."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.engine import ENGINES, SGLangSettings
from megappo.config.rules.layouts import valid_tensor_parallel
from megappo.config.schema import Config
from megappo.config.server_words import word_rules
from megappo.errors import divisors, either, nearest_numbers
from megappo.families import FAMILIES
from megappo.families.architecture import ArchitectureConfig, ModelShape


def server_rules(config: Config, shape: ModelShape) -> Iterator[str]:
    """Check that the settings of SGLang servers fit other settings and the actor's model. `resolve` must have chosen
    the engine."""
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
            f"rollout.dtype is {rollout.dtype}, but SGLang uses the actor's tensors without conversion; "
            f"set it to model.dtype {config.model.dtype}, or remove it"
        )
    if rollout.when_stopped == "keep" and rollout.servers.deterministic is False:
        yield (
            "rollout.when_stopped is keep and rollout.sglang.deterministic is false, so short responses are kept, long "
            "responses are sampled again, and responses get shorter; set when_stopped to drop, or deterministic to true"
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
            f"rollout.sglang.verify is true, but SGLang stores the weights of a {shape.family} in a different order, "
            "so checksums cannot be compared; set verify to false"
        )
    yield from word_rules(rollout.servers)
    yield from _node_rules(rollout.servers)
    yield from _attention_rules(rollout.servers, shape)
    yield from _expert_rules(rollout.servers, shape)
    drafts = rollout.servers.arguments.get("speculative-algorithm", "NGRAM")
    if drafts != "NGRAM":  # NGRAM drafts tokens without weights
        yield (
            f"rollout.sglang.arguments has speculative-algorithm {drafts}, but a run sends only the actor's weights "
            "and no weights of draft layers; remove it"
        )


def _attention_rules(servers: SGLangSettings, shape: ModelShape) -> Iterator[str]:
    """Check `data_parallel_attention`. SGLang must support the option for the model, and each rank must have a known
    part of the weights."""
    tp, groups, key = servers.tensor_parallel, servers.data_parallel_attention, "rollout.sglang.data_parallel_attention"
    if groups == 1:
        return
    if tp % groups:
        nearest = nearest_numbers(groups, divisors(tp))
        yield f"{key} {groups} does not divide tensor_parallel {tp}; the nearest is {nearest}"
    able = [name for name, family in FAMILIES.items() if family.attends_in_groups]
    if shape.family not in able:
        yield f"{key} is {groups}, which SGLang supports for {either(able)}, but not for {shape.family}; set it to 1"
    elif shape.tied_embeddings:
        yield f"{key} is {groups}, but the model's embedding is its output layer, which other ranks share; set it to 1"


def _node_rules(servers: SGLangSettings) -> Iterator[str]:
    """Check that `nodes` divides a server's ranks evenly."""
    tp, nodes = servers.tensor_parallel, servers.nodes
    if tp % nodes:
        nearest = nearest_numbers(nodes, divisors(tp))
        yield f"rollout.sglang.nodes {nodes} does not divide tensor_parallel {tp}; the nearest is {nearest}"


def _expert_rules(servers: SGLangSettings, shape: ModelShape) -> Iterator[str]:
    """Check that a server's ranks divide the experts and the matrices of each expert evenly, so that each rank has a
    known part of the weights."""
    tp, ep, key = servers.tensor_parallel, servers.expert_parallel, "rollout.sglang.expert_parallel"
    if ep > 1 and not shape.experts:
        yield f"{key} {ep}, but the actor model has no experts; set it to 1"
    elif tp % ep or shape.experts % ep:
        nearest = nearest_numbers(ep, [n for n in divisors(tp) if not shape.experts % n])
        experts = f" and {shape.experts} (experts)" if shape.experts % ep else ""
        yield f"{key} {ep} does not divide rollout.sglang.tensor_parallel {tp}{experts}; the nearest is {nearest}"
    elif shape.experts and shape.ffn_hidden_size % (tp // ep):
        fitting = [n for n in divisors(tp) if not shape.experts % n and not shape.ffn_hidden_size % (tp // n)]
        remedy = f"the nearest is {nearest_numbers(ep, fitting)}" if fitting else "lower tensor_parallel"
        yield (
            f"{key} {ep} splits each expert between {tp // ep} ranks, which do not divide the {shape.ffn_hidden_size} "
            f"(FFN hidden size) of an expert; {remedy}"
        )
