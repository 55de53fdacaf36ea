-- What a tenant or one of its keys stores is added up from this alone.
CREATE INDEX files_stored ON files (tenant, key_id, expires_at, bytes) WHERE deleted_at IS NULL;
