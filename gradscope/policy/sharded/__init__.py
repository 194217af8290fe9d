"""Sharded checkpoints of distributed trainers: finding them and joining them in one process, without unpickling."""
