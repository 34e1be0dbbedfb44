"""A run of PPO: its parts, the step and the stages of a step, and how it begins, stops and resumes."""
