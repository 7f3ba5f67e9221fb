"""Where tensors come from and go to: checkpoints, rank folders, memory, and a function of the index."""
