"""One run's directory: its configuration, history, owner and measurements."""
