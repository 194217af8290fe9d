"""Which α and η are worth a run: settings screened to first order and by real steps."""
