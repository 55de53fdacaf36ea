"""Plans of a job whose lines are known before they are computed: what is asked at all, and in which order. Pure."""
