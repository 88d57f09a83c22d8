"""Looking for what went wrong: which stage loses accuracy."""
