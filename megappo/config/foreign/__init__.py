"""Names of settings in other trainers, and the settings of megappo that do the same."""
