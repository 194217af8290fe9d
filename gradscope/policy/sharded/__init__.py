"""Checkpoints in shards, as distributed trainers leave them: found, put together in one process, never unpickled."""
