"""Ahead-of-time autograd: from a torch-level graph to functional ATen graphs, forward and backward."""
