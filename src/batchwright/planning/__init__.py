"""Plans of a job whose lines are known before they are computed: which are computed, and in which order. Pure."""
