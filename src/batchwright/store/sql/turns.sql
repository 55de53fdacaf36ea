-- Whose batch is validated next, and whose is finished. Tenants take turns: the tenant whose last turn was longest ago
-- goes next. Each tenant is looked up in the index, so that it does not matter how many batches it has.

-- name: tenants_to_validate
WITH RECURSIVE waiting (tenant) AS (
    SELECT min(tenant) FROM batches WHERE status = 'validating'
    UNION ALL
    SELECT (SELECT min(b.tenant) FROM batches AS b WHERE b.status = 'validating' AND b.tenant > w.tenant)
    FROM waiting AS w WHERE w.tenant IS NOT NULL
)
SELECT w.tenant FROM waiting AS w LEFT JOIN tenants AS t ON t.tenant = w.tenant
WHERE w.tenant IS NOT NULL
ORDER BY
    coalesce(t.validated_at, 0),
    (SELECT min(b.key) FROM batches AS b WHERE b.tenant = w.tenant AND b.status = 'validating');

-- name: tenants_to_finish
WITH RECURSIVE waiting (tenant) AS (
    SELECT min(tenant) FROM batches WHERE ending IS NOT NULL
    UNION ALL
    SELECT (SELECT min(b.tenant) FROM batches AS b WHERE b.ending IS NOT NULL AND b.tenant > w.tenant)
    FROM waiting AS w WHERE w.tenant IS NOT NULL
)
SELECT w.tenant FROM waiting AS w LEFT JOIN tenants AS t ON t.tenant = w.tenant
WHERE w.tenant IS NOT NULL
ORDER BY
    coalesce(t.finished_at, 0),
    (SELECT min(b.key) FROM batches AS b WHERE b.tenant = w.tenant AND b.ending IS NOT NULL);

-- name: tenant_validates
INSERT INTO tenants (tenant, validated_at) VALUES (:tenant, :now)
ON CONFLICT (tenant) DO UPDATE SET validated_at = excluded.validated_at;

-- name: tenant_finishes
INSERT INTO tenants (tenant, finished_at) VALUES (:tenant, :now)
ON CONFLICT (tenant) DO UPDATE SET finished_at = excluded.finished_at;
