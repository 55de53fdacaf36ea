-- When a batch of the tenant was last taken to be validated, and when to be finished; see turns.sql.
ALTER TABLE tenants ADD COLUMN validated_at DOUBLE PRECISION NOT NULL DEFAULT 0;
ALTER TABLE tenants ADD COLUMN finished_at DOUBLE PRECISION NOT NULL DEFAULT 0;

DROP INDEX batches_validating;
CREATE INDEX batches_validating ON batches (tenant, key) WHERE status = 'validating';
DROP INDEX batches_ending;
CREATE INDEX batches_ending ON batches (tenant, key) WHERE ending IS NOT NULL;

-- Messages that were given up, of all tenants, by age: they are removed after a while.
CREATE INDEX deliveries_given_up ON deliveries (failed_at) WHERE failed_at IS NOT NULL;
