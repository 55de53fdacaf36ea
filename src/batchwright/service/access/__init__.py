"""Who may ask for what, and how much: API keys, quotas, admission of online calls, the audit log."""
