-- How many transactions each connection of a process committed: what tells, after one was lost in COMMIT, what came of it.
CREATE TABLE connections (
    id TEXT PRIMARY KEY,
    commits BIGINT NOT NULL,
    used_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX connections_used ON connections (used_at);
