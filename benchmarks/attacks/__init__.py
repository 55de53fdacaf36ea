"""What hostile clients can do to `batchwright serve`, measured on loopback and bounded in time."""
