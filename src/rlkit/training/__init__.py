"""Training: the trainer, its loop, schedules, weights and checkpoints."""
