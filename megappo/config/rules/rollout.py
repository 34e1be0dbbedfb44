"""Rules for lengths, sampling and engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megappo.config.schema import Config
from megappo.families.architecture import ModelShape
from megappo.families.rope import scaled_positions
from megappo.models.tokens import without_row


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
    """Check `rollout.ahead`. The engine must generate while the trainer computes, and samples of older weights need
    importance weights."""
    rollout = config.rollout
    answered = rollout.replays_arrivals or rollout.load_from is not None
    is_known = rollout.engine_name is not None and not answered
    if rollout.ahead and is_known and not rollout.capabilities.concurrent:
        remedy = ", or set `concurrent` in its capabilities" if rollout.is_custom else ""
        yield (
            f"rollout.ahead is {rollout.ahead}, but the engine '{rollout.engine_name}' does not generate while the "
            f"trainer computes; set it to 0{remedy}"
        )
    elif rollout.ahead and config.algorithm.old_logprob == "decoupled":
        yield (
            f"rollout.ahead is {rollout.ahead}, so samples come from older weights than the actor's, but "
            "algorithm.old_logprob 'decoupled' does not correct for them; set it to corrected or bypass, or "
            "rollout.ahead to 0"
        )


def stop_token_rules(config: Config, shapes: Mapping[str, ModelShape]) -> Iterator[str]:
    """Check that stop tokens can be sampled and have a row in every role. The keys of `shapes` are model names for
    messages."""
    name, rows = min(((n, shape.vocab_size) for n, shape in shapes.items()), key=lambda item: item[1])
    missing = without_row(config.rollout.stop_token_ids, rows)
    if missing is not None:
        yield (
            f"rollout.stop_token_ids has {missing}, for which the {name} model has no row (its vocab_size is {rows}); "
            f"set ids of at most {rows - 1}, or remove it"
        )


def response_length_rules(config: Config) -> Iterator[str]:
    """Check that the limits of prompts and responses leave room for a response."""
    rollout, prompt = config.rollout, config.data.max_prompt_tokens
    least, total = rollout.min_response_tokens, rollout.max_total_tokens
    if least > rollout.max_response_tokens:
        yield (
            f"rollout.min_response_tokens {least} is above rollout.max_response_tokens {rollout.max_response_tokens}; "
            f"set at most {rollout.max_response_tokens}"
        )
    if total is not None and total < prompt + max(least, 1):
        yield (
            f"rollout.max_total_tokens {total} leaves no room for a response of {max(least, 1)} after a prompt of "
            f"data.max_prompt_tokens {prompt}; set at least {prompt + max(least, 1)}, or lower data.max_prompt_tokens"
        )


def environment_rules(config: Config) -> Iterator[str]:
    """Yield a sentence for each conflict of episodes with other settings."""
    rollout, function = config.rollout, config.reward.function
    environment = rollout.episodes
    if environment is None:
        if function == "environment":
            yield (
                "reward.function is environment, but rollout.environment has no environment with rewards; "
                "set rollout.environment.name, or another reward.function"
            )
        return
    most = environment.max_turn_tokens
    if most is not None and most > rollout.max_response_tokens:
        yield (
            f"rollout.environment.max_turn_tokens {most} is above rollout.max_response_tokens "
            f"{rollout.max_response_tokens}, the limit of all turns together; set max_turn_tokens to at most "
            f"{rollout.max_response_tokens}"
        )
