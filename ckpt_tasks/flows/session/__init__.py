"""Sessions: they hold the live state of a training between attempts."""
