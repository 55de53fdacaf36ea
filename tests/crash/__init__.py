"""The service under load is killed, again and again: nothing that was acknowledged may be lost."""
