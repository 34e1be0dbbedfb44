"""Advantage estimators: one file each, with a function of the file's name; your own is named by its import path.

An estimator is called by keyword, with those of the following that it has parameters for:

    rewards      (B, T) per token, the weighted KL subtracted where it is in the reward
    values       (B, T) of the critic, which an estimator that takes them needs
    mask         (B, T) bool
    group_ids    (B,) int64; samples of one prompt share one, and are on one rank
    gamma        the setting
    lam          of the advantages: a number, or where it is `length_adaptive` (B,) one of each sample
    critic_lam   of the returns, which the critic learns: a number
    gae          a function of rewards, values, mask, gamma and lam, by keyword, that does GAE: by tokens or by turns,
                 as `algorithm.discount_at` says

It returns advantages and returns, both (B, T), 0 at masked positions. They are whitened over the global batch
afterwards where the settings say so, unless the function is `unwhitened`.
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
    """Declare an estimator whose advantages are already scaled and are not whitened."""
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
        """Whether the estimator can use values, so that a critic is of use."""
        return "values" in taken_by(self.compute, ARGUMENTS)

    @property
    def tells_lambdas_apart(self) -> bool:
        """Whether the critic's returns may have a lambda of their own."""
        return "critic_lam" in taken_by(self.compute, ARGUMENTS)

    @property
    def discounts_by_turn(self) -> bool:
        """Whether the estimator computes by `gae`, which applies gamma and lambda by tokens or by turns."""
        return "gae" in taken_by(self.compute, ARGUMENTS)

    @property
    def compares_samples(self) -> bool:
        """Whether the estimator needs several samples of a prompt."""
        return "group_ids" in inspect.signature(self.compute).parameters

    @property
    def whitens(self) -> bool:
        """Whether whitening may follow."""
        return getattr(self.compute, "whitens", True)

    def __call__(self, **offered: Any) -> tuple[Tensor, Tensor]:
        """Estimate advantages and returns from all of ARGUMENTS, by keyword.

        `gae` may be left out, and `critic_lam` too: its default is `lam`. `values` may be None where the estimator does
        not need them. Raises ValueError where needed values are missing or the result has another form.
        """
        from megappo.algo.masks import check_mask
        from megappo_kernels.gae import gae

        if self.needs_critic and offered["values"] is None:
            raise ValueError(f"estimator '{self.name}' needs values; add a critic section, or choose grpo or rloo")
        given = {"gae": gae, "critic_lam": offered["lam"], **offered}
        found = self.compute(**{name: given[name] for name in taken_by(self.compute, ARGUMENTS)}, **self.options)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"estimator '{self.name}' returned {type(found).__name__}, must be (advantages, returns)")
        check_mask(given["mask"], advantages=found[0], returns=found[1])
        return found


def builtin(name: str) -> Estimator:
    """Built-in estimator of this name, one of NAMES."""
    return Estimator(name, getattr(import_module(f"{__name__}.{name}"), name))
