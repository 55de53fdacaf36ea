"""Access control: API keys, quotas, admission of online calls, and the audit log."""
