-- Keys expire, open only what their scopes say, are rotated, and have a share, a best priority and quotas. Those that
-- were given out before keep the rights that they had.
ALTER TABLE api_keys ADD COLUMN expires_at REAL;
ALTER TABLE api_keys ADD COLUMN scopes TEXT NOT NULL DEFAULT '["online", "batches", "metrics"]';
ALTER TABLE api_keys ADD COLUMN weight REAL NOT NULL DEFAULT 1;
ALTER TABLE api_keys ADD COLUMN best_priority INTEGER;
ALTER TABLE api_keys ADD COLUMN last_used_at REAL;
ALTER TABLE api_keys ADD COLUMN previous_until REAL;
ALTER TABLE api_keys ADD COLUMN quotas TEXT NOT NULL DEFAULT '{}';
ALTER TABLE api_keys ADD COLUMN previous_digest BLOB;

CREATE INDEX api_keys_previous ON api_keys (previous_digest) WHERE previous_digest IS NOT NULL;

-- Whose batch it is, and the smallest priority that its lines have.
ALTER TABLE batches ADD COLUMN key_id TEXT;
ALTER TABLE batches ADD COLUMN best_priority INTEGER;

-- What quotas are compared with: estimates of a batch until it has been validated, the lines of an input file (NULL:
-- not counted), who uploaded it.
ALTER TABLE batches ADD COLUMN enqueued_lines INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN enqueued_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE files ADD COLUMN lines INTEGER;
ALTER TABLE files ADD COLUMN key_id TEXT;

CREATE INDEX batches_enqueued ON batches (tenant)
WHERE status IN ('validating', 'in_progress') AND ending IS NULL;

CREATE TABLE tenant_quotas (
    tenant TEXT PRIMARY KEY,
    quotas TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- What online requests used of their rates of late, in slots of seconds, counted by all servers together.
CREATE TABLE rates (
    rate TEXT NOT NULL,
    slot INTEGER NOT NULL,
    amount INTEGER NOT NULL,
    PRIMARY KEY (rate, slot)
) STRICT, WITHOUT ROWID;

CREATE INDEX rates_by_slot ON rates (slot);

-- What a server tells the others of itself.
ALTER TABLE workers ADD COLUMN snapshot TEXT;
