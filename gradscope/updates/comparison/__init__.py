"""What every token weighting would do with one batch: served tokens, directions, signal and noise."""
