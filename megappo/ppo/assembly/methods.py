"""Functions of the section `algorithm`: estimator and policy loss, by name or by import path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from megappo.algo.estimators import ARGUMENTS, Estimator, builtin
from megappo.algo.lambdas import length_adaptive
from megappo.config import Config, ConfigError
from megappo.config.rules.estimators import estimator_rules
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.plugins import check_call, is_import_path, load_function, users_code
from megappo_kernels.losses import PolicyInputs, ppo_token_loss
from megappo_kernels.objectives import OFFERED, OwnLoss, PolicyObjective, taken_by


def find_estimator(algorithm: AlgorithmSettings) -> Estimator:
    """Return the estimator of `algorithm.estimator`. Raises ValueError if the estimator cannot be imported or
    called."""
    name, options = algorithm.estimator, algorithm.estimator_options
    if not is_import_path(name):
        return builtin(name)
    compute = load_function(name, "algorithm.estimator")
    what, remedy = f"algorithm.estimator '{name}'", "change its parameters or algorithm.estimator_options"
    check_call(compute, taken_by(compute, ARGUMENTS), options, what=what, remedy=remedy, offered=ARGUMENTS)
    return Estimator(name, compute, options)


def lambdas(algorithm: AlgorithmSettings, mask_BR: Tensor) -> dict[str, float | Tensor]:
    """Return `lam` and `critic_lam` of an estimator. `mask_BR` is True at the tokens of a sample that count."""
    actor, critic = algorithm.lam.actor, algorithm.lam.critic
    if actor.length_adaptive is not None:
        return {"lam": length_adaptive(mask=mask_BR, alpha=actor.length_adaptive), "critic_lam": critic}
    assert actor.number is not None
    return {"lam": actor.number, "critic_lam": critic}


def find_objective(algorithm: AlgorithmSettings, penalty_coef: float) -> PolicyObjective:
    """Return the objective of a policy update: `algorithm.policy_loss` with its settings.

    `penalty_coef` is the weight of KL(old || new) with `policy_loss: penalty`. Raises ValueError if a custom loss
    cannot be imported or called.
    """
    loss: str | OwnLoss = algorithm.policy_loss
    if is_import_path(algorithm.policy_loss):
        function, options = load_function(algorithm.policy_loss, "algorithm.policy_loss"), algorithm.policy_loss_options
        what, remedy = f"algorithm.policy_loss '{loss}'", "change its parameters or algorithm.policy_loss_options"
        check_call(function, taken_by(function, OFFERED), options, what=what, remedy=remedy, offered=OFFERED)
        loss = partial(function, **options)
    settings = {key.replace(".", "_"): value for key, value in algorithm.loss_settings.items()}
    settings["penalty_coef"] = penalty_coef
    if algorithm.kl_in_loss is not None:
        settings |= {"kl": algorithm.kl_in_loss.kind, "kl_coef": algorithm.kl_in_loss.coef}
    return PolicyObjective(policy_loss=loss, entropy_coef=algorithm.entropy_coef, **settings)


def check_methods(config: Config) -> None:
    """Import the user functions in the settings and call them with six tokens, before expensive work starts.

    Raises ConfigError if a function cannot be imported or called, contradicts other sections, fails, or returns a
    wrong result.
    """
    algorithm = config.algorithm
    estimator, objective = find_estimator(algorithm), find_objective(algorithm, algorithm.penalty.coef)
    problems = list(estimator_rules(config, estimator))
    if problems:
        raise ConfigError(problems)
    mask_BR = torch.tensor([[True, True, True], [True, False, False]])
    numbers_BR = torch.linspace(-1, 1, 6).view(2, 3)
    with _tried("algorithm.estimator", algorithm.estimator):
        outputs = estimator(
            rewards=numbers_BR,
            values=None if config.critic is None else -numbers_BR,
            mask=mask_BR,
            group_ids=torch.zeros(2, dtype=torch.int64),
            gamma=algorithm.gamma,
            **lambdas(algorithm, mask_BR),
        )
        _check_finite("advantages or returns", *outputs)
    sequences_BR = torch.tensor([[0, 0, 0], [1, 1, 1]])
    fields = {"old_logprob": numbers_BR - 2, "advantages": numbers_BR, "weights": mask_BR / 4}
    inputs = PolicyInputs(**fields, mask=mask_BR, ref_logprob=numbers_BR - 2, sequences=sequences_BR)
    with _tried("algorithm.policy_loss", algorithm.policy_loss):
        logprob_BR = (0.9 * numbers_BR - 2).requires_grad_()
        out = ppo_token_loss(logprob=logprob_BR, entropy=numbers_BR + 1, inputs=inputs, objective=objective)
        _check_finite("a loss or slopes", out.loss, *torch.autograd.grad(out.loss, logprob_BR))


def _check_finite(what: str, *tensors: Tensor) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise ValueError(f"it returned {what} that are not finite for six ordinary tokens; correct the function")


@contextmanager
def _tried(setting: str, name: str) -> Iterator[None]:
    """Raise every error of the block as ConfigError. A ValueError of megappo already describes its cause."""
    try:
        with users_code("it failed", "fix it", keeps_ours=True):
            yield
    except ValueError as error:
        raise ConfigError(f"{setting} '{name}': {error}") from error
