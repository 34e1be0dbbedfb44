"""Files of a run: checkpoints, experience, exports, and the record of the run."""
