"""Rules on what SGLang servers need of other settings and of the model."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.engine import ENGINES
from megappo.config.rules import experts, server_topology
from megappo.config.rules.layouts import valid_tensor_parallel
from megappo.config.schema import Config
from megappo.config.server_words import word_rules
from megappo.errors import either, nearest_numbers
from megappo.families.architecture import ArchitectureConfig, ModelShape


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
    yield from server_topology.node_rules(rollout.servers)
    yield from server_topology.attention_rules(rollout.servers, shape)
    yield from experts.server_rules(rollout.servers, shape)
    drafts = rollout.servers.arguments.get("speculative-algorithm", "NGRAM")
    if drafts != "NGRAM":  # NGRAM drafts tokens without weights
        yield (
            f"rollout.sglang.arguments has speculative-algorithm {drafts}, but a run sends its servers the actor's "
            "weights, and none of layers that draft tokens; remove it"
        )
