"""What one step computes, as flat tensors."""
