"""Access control: API keys, quotas, admission of online calls, the audit log."""
