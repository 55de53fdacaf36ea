"""Several copies of a model, each in a process of its own, behind one `Inference`."""
