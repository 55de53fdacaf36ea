"""The computation of one step as flat tensors."""
