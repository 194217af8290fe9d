"""One file per trainer whose logs are read; `base` says what a format is."""
