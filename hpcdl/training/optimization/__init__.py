"""Loss, metrics, optimizers and learning-rate schedules."""
