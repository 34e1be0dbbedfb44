"""Settings: the YAML file, its overrides, the rules, and every number that follows from them."""

from megappo.config.derive import (
    Derived,
    ModelShape,
    RoleNumbers,
    check_run,
    derive,
    derive_run,
    describe,
    model_shape,
    print_table,
    resolve,
)
from megappo.config.errors import ConfigError
from megappo.config.load import load_config, save_config
from megappo.config.schema import Config

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
    "model_shape",
    "print_table",
    "resolve",
    "save_config",
]
