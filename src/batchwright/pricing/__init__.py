"""What requests cost, at most and in fact, and how much of a budget is left: pure decisions, in whole picodollars."""
