"""Graph passes: what they are, how they run, and rewriting by patterns."""
