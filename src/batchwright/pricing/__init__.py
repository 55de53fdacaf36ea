"""Greatest and actual costs of requests, and what is left of a budget: pure decisions, in whole picodollars."""
