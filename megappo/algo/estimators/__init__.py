"""Advantage estimators. Each file contains one function with the name of the file. An import path selects a custom
estimator.

An estimator is called with keyword arguments for its parameters:

    rewards      (B, T) per token, with the weighted KL subtracted if it is part of the reward
    values       (B, T) of the critic; an estimator with this parameter and no default requires a critic
    mask         (B, T) bool
    group_ids    (B,) int64; all samples of a prompt have the same id and are on one rank
    gamma        the setting
    lam          lambda of the advantages: a number, or (B,) one per sample with `length_adaptive`
    critic_lam   lambda of the returns, which the critic learns: a number
    gae          a function for GAE with keyword arguments rewards, values, mask, gamma and lam; time steps are
                 tokens or turns, according to `algorithm.discount_at`

The estimator returns advantages and returns, both (B, T), 0 at masked positions. Advantages are then whitened over
the global batch if the settings enable whitening, unless the function is `unwhitened`.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megappo_kernels.objectives import taken_by

if TYPE_CHECKING:  # names of estimators are used without importing torch
    from torch import Tensor

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
ARGUMENTS = ("rewards", "values", "mask", "group_ids", "gamma", "lam", "critic_lam", "gae")

_Function = TypeVar("_Function", bound="Callable[..., tuple[Tensor, Tensor]]")


class GAE(Protocol):
    """Signature of `megappo_kernels.gae.gae`, on any device."""

    def __call__(
        self, *, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
    ) -> tuple[Tensor, Tensor]: ...


def unwhitened(compute: _Function) -> _Function:
    """Mark an estimator whose advantages are already scaled. These advantages are not whitened."""
    compute.whitens = False  # type: ignore[attr-defined]
    return compute


@dataclass(frozen=True)
class Estimator:
    """A function that estimates advantages, with the properties that follow from its parameters."""

    name: str
    compute: Callable[..., tuple[Tensor, Tensor]]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator requires values."""
        values = inspect.signature(self.compute).parameters.get("values")
        return values is not None and values.default is inspect.Parameter.empty

    @property
    def takes_values(self) -> bool:
        """Whether the estimator can use values. A critic is then useful."""
        return "values" in taken_by(self.compute, ARGUMENTS)

    @property
    def has_critic_lam(self) -> bool:
        """Whether the returns of the critic may have a separate lambda."""
        return "critic_lam" in taken_by(self.compute, ARGUMENTS)

    @property
    def discounts_by_turn(self) -> bool:
        """Whether the estimator uses `gae`, which applies gamma and lambda by tokens or by turns."""
        return "gae" in taken_by(self.compute, ARGUMENTS)

    @property
    def compares_samples(self) -> bool:
        """Whether the estimator requires several samples of a prompt."""
        return "group_ids" in inspect.signature(self.compute).parameters

    @property
    def whitens(self) -> bool:
        """Whether whitening may follow."""
        return getattr(self.compute, "whitens", True)

    def __call__(self, **offered: Any) -> tuple[Tensor, Tensor]:
        """Estimate advantages and returns from all ARGUMENTS, passed by keyword.

        `gae` and `critic_lam` are optional. The default of `critic_lam` is `lam`. `values` may be None if the
        estimator does not require values. Raises ValueError if required values are missing or if the result has
        another form.
        """
        from megappo.algo.masks import check_mask
        from megappo_kernels.gae import gae

        if self.needs_critic and offered["values"] is None:
            raise ValueError(f"estimator '{self.name}' requires values; add a critic section, or select grpo or rloo")
        arguments = {"gae": gae, "critic_lam": offered["lam"], **offered}
        result = self.compute(**{name: arguments[name] for name in taken_by(self.compute, ARGUMENTS)}, **self.options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"estimator '{self.name}' returned {type(result).__name__}, must be (advantages, returns)")
        check_mask(arguments["mask"], advantages=result[0], returns=result[1])
        return result


def builtin(name: str) -> Estimator:
    """Return the built-in estimator with this name, one of NAMES."""
    return Estimator(name, getattr(import_module(f"{__name__}.{name}"), name))
