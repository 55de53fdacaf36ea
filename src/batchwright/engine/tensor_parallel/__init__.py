"""One model shared by several processes: rank 0 plans and samples, and each rank computes its part of every layer."""
