"""Settings: the YAML file, its overrides, the rules, and every number that follows from them."""

from megappo.config.derive import (
    Derived,
    RoleNumbers,
    check_run,
    derive,
    derive_run,
    describe,
    describe_evaluation,
    print_rows,
    resolve,
)
from megappo.config.load import load_config, save_config
from megappo.config.schema import Config
from megappo.errors import ConfigError
from megappo.families.architecture import ModelShape

__all__ = [
    "Config",
    "ConfigError",
    "Derived",
    "ModelShape",
    "RoleNumbers",
    "check_run",
    "derive",
    "derive_run",
    "describe",
    "load_config",
    "describe_evaluation",
    "print_rows",
    "resolve",
    "save_config",
]
