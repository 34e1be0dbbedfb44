"""Rules for lengths, sampling and engines."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.schema import Config
from megappo.families.architecture import ModelShape
from megappo.families.rope import scaled_positions


def length_rules(config: Config, shapes: dict[str, ModelShape]) -> Iterator[str]:
    """Check that prompt and response fit the positions of every model. The keys of `shapes` are model names for
    messages."""
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
                scaled = scaled_positions(shape)
                if scaled > room:
                    remedy += (
                        f", or set max_position_embeddings in config.json to {scaled}, the length of its rope scaling"
                    )
                yield (
                    f"data.max_prompt_tokens {prompt} + {section}.max_response_tokens {response} = {prompt + response} "
                    f"is above max_position_embeddings {room} of the {name} model; {remedy}"
                )


def sampling_rules(config: Config) -> Iterator[str]:
    """Check that other settings do not disable a generation function, dynamic sampling or the shaping of scores."""
    rollout, overlong = config.rollout, config.reward.overlong
    if rollout.generation is not None and (rollout.ahead or rollout.episodes is not None):
        other = f"rollout.ahead is {rollout.ahead}" if rollout.ahead else "rollout.environment plays episodes"
        remedy = "rollout.ahead to 0" if rollout.ahead else "rollout.environment to null"
        yield f"rollout.generation is given, but {other}, which does not use it; set {remedy}, or generation to null"
    if rollout.dynamic_sampling is not None and rollout.samples_per_prompt < 2:
        yield (
            f"rollout.dynamic_sampling compares the samples of a prompt, but rollout.samples_per_prompt is "
            f"{rollout.samples_per_prompt}; set it to at least 2, or dynamic_sampling to null"
        )
    if config.reward.is_rescaled and rollout.episodes is not None:
        yield (
            "reward.normalize, scale, shift and clip apply to the scores of functions, but rollout.environment returns "
            "its own rewards; scale rewards in the environment, and remove these settings"
        )
    if overlong is not None and overlong.buffer_tokens > rollout.max_response_tokens:
        yield (
            f"reward.overlong.buffer_tokens {overlong.buffer_tokens} is above rollout.max_response_tokens "
            f"{rollout.max_response_tokens}; lower it to this limit"
        )


def engine_rules(config: Config) -> Iterator[str]:
    """Check `rollout.ahead`. The engine must run in separate processes, and samples of older weights need importance
    weights."""
    rollout = config.rollout
    answered = rollout.replays_arrivals or rollout.load_from is not None
    if rollout.ahead and rollout.engine == "transformers" and not answered:
        ahead, engine = rollout.ahead, rollout.engine
        yield f"rollout.ahead is {ahead}, but the engine '{engine}' has no separate processes; set it to 0"
    elif rollout.ahead and config.algorithm.old_logprob == "decoupled":
        yield (
            f"rollout.ahead is {rollout.ahead}, so samples come from older weights than the actor's, but "
            "algorithm.old_logprob 'decoupled' does not correct for them; set it to corrected or bypass, or "
            "rollout.ahead to 0"
        )
