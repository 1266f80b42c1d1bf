"""Save: from the live state to a committed checkpoint."""
