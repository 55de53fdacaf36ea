"""What knowing a job beforehand is worth: the order of its lines, identical lines, and what planning costs."""
