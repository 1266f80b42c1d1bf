"""From a live state to a commit."""
