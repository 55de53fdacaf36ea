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
