"""Several copies of a model, each in its own process, behind one `Inference`."""
