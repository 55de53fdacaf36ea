"""Messages to other servers: signing, safe addresses, the outbox."""
