"""Files of other tools become a run: opened, read without being executed, and taken apart into groups."""
