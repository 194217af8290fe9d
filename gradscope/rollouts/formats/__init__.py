"""One file per trainer whose dumps are read; `base` says what a format is."""
