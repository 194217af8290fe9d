"""Compare token weightings on one batch: which tokens they favour, directions, signal and noise."""
