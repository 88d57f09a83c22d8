"""Side-by-side timing of eager PyTorch, torch.compile and minicompile."""
