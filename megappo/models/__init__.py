"""The Megatron-Core side: layouts, models, schedules and roles."""
