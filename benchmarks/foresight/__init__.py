"""The value of knowing a job in advance: the order of its lines, identical lines, and the cost of planning."""
