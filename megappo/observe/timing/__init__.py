"""Time of the stages of a step, and the use of the hardware."""
