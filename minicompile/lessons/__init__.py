"""What the notebooks are made of: the lesson model, its text, training, and check cells."""
