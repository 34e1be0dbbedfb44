"""Rules of SGLang servers whose ranks stand on several machines, or attend in groups."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.engine import SGLangSettings
from megappo.errors import divisors, either, nearest_numbers
from megappo.families import FAMILIES
from megappo.families.architecture import ModelShape


def attention_rules(servers: SGLangSettings, shape: ModelShape) -> Iterator[str]:
    """Rules on `data_parallel_attention`: SGLang has it for the model, and the places of the weights are known."""
    tp, groups, key = servers.tensor_parallel, servers.data_parallel_attention, "rollout.sglang.data_parallel_attention"
    if groups == 1:
        return
    if tp % groups:
        nearest = nearest_numbers(groups, divisors(tp))
        yield f"{key} {groups} does not divide tensor_parallel {tp}; the nearest is {nearest}"
    able = [name for name, family in FAMILIES.items() if family.attends_in_groups]
    if shape.family not in able:
        yield f"{key} is {groups}, which SGLang has for {either(able)}, not for {shape.family}; set it to 1"
    elif shape.tied_embeddings:
        yield f"{key} is {groups}, but the model's embedding is its output layer, which other ranks share; set it to 1"


def node_rules(servers: SGLangSettings) -> Iterator[str]:
    """Rule on `nodes`: each machine has as many of a server's ranks."""
    tp, nodes = servers.tensor_parallel, servers.nodes
    if tp % nodes:
        nearest = nearest_numbers(nodes, divisors(tp))
        yield f"rollout.sglang.nodes {nodes} does not divide tensor_parallel {tp}; the nearest is {nearest}"
