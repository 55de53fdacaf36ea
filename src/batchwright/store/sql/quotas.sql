-- name: tenant_quotas
SELECT tenant, quotas FROM tenant_quotas ORDER BY tenant;

-- name: quotas_of_tenant
SELECT quotas FROM tenant_quotas WHERE tenant = :tenant;

-- name: quotas_of_key
SELECT quotas FROM api_keys WHERE id = :key_id;

-- name: set_tenant_quotas
INSERT INTO tenant_quotas (tenant, quotas) VALUES (:tenant, :quotas)
ON CONFLICT (tenant) DO UPDATE SET quotas = excluded.quotas;

-- name: remove_tenant_quotas
DELETE FROM tenant_quotas WHERE tenant = :tenant;

-- Until the end of the transaction nobody else adds files or batches of this tenant that are compared with quotas.
-- name: lock_tenant
SELECT :tenant;

-- name: stored_bytes
SELECT CAST(coalesce(sum(bytes), 0) AS BIGINT) FROM files
WHERE tenant = :tenant AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
    AND (CAST(:key_id AS TEXT) IS NULL OR key_id = :key_id);

-- name: enqueued
SELECT
    CAST(coalesce(sum(
        CASE status WHEN 'validating' THEN enqueued_lines ELSE total - completed - failed END
    ), 0) AS BIGINT),
    CAST(coalesce(sum(
        CASE WHEN status = 'validating' OR total = 0 THEN enqueued_tokens
        ELSE enqueued_tokens * (total - completed - failed) / total END
    ), 0) AS BIGINT)
FROM batches
WHERE tenant = :tenant AND status IN ('validating', 'in_progress') AND ending IS NULL
    AND (CAST(:key_id AS TEXT) IS NULL OR key_id = :key_id);

-- name: quotas_of_keys
SELECT id, tenant, quotas FROM api_keys WHERE revoked_at IS NULL ORDER BY id;

-- name: stored_of_all
SELECT tenant, key_id, CAST(sum(bytes) AS BIGINT) FROM files
WHERE deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
GROUP BY tenant, key_id;

-- name: enqueued_of_all
SELECT
    tenant,
    key_id,
    CAST(sum(CASE status WHEN 'validating' THEN enqueued_lines ELSE total - completed - failed END) AS BIGINT),
    CAST(sum(
        CASE WHEN status = 'validating' OR total = 0 THEN enqueued_tokens
        ELSE enqueued_tokens * (total - completed - failed) / total END
    ) AS BIGINT)
FROM batches
WHERE status IN ('validating', 'in_progress') AND ending IS NULL
GROUP BY tenant, key_id;

-- SQLite has one writer at a time.
-- name: lock_exchange
SELECT 1;

-- name: add_rates
INSERT INTO rates (rate, slot, amount) VALUES (:rate, :slot, :amount)
ON CONFLICT (rate, slot) DO UPDATE SET amount = rates.amount + excluded.amount;

-- name: rates
SELECT rate, slot, amount FROM rates
WHERE slot >= :oldest AND (slot >= :since OR rate IN (SELECT value FROM json_each(:rates)));

-- name: forget_rates
DELETE FROM rates WHERE slot < :oldest;
