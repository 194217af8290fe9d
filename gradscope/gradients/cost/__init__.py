"""What measuring and training cost: FLOPs, bytes and seconds by part, from the configuration and the rollouts alone."""
