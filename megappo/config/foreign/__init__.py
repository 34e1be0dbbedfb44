"""Names of settings in other trainers, and the equivalent settings of megappo."""
