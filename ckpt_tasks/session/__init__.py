"""Who computes: a session holds the live state between attempts."""
