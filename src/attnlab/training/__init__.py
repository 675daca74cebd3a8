"""Training one model: recipe, loop, checkpoints and the run folder."""
