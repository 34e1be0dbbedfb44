"""A run of PPO: its parts, the step, what the stages of a step do, and how it begins, stops and goes on."""
