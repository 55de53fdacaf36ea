-- What is claimed for whom; the rule is in limiting/shares.py.

-- Tenants with something to compute, and those that were active at the last change. Each tenant is looked up in the
-- index, so that it does not matter how many batches it has.
-- name: claimants
WITH RECURSIVE running (tenant) AS (
    SELECT min(tenant) FROM batches WHERE status = 'in_progress'
    UNION ALL
    SELECT (SELECT min(b.tenant) FROM batches AS b WHERE b.status = 'in_progress' AND b.tenant > r.tenant)
    FROM running AS r WHERE r.tenant IS NOT NULL
)
SELECT
    a.tenant,
    coalesce(t.weight, 1),
    coalesce(t.served, 0),
    coalesce(t.line_tokens, 0),
    coalesce(t.active, FALSE),
    coalesce(t.rests_until, 0),
    EXISTS (
        SELECT 1 FROM batches AS b
        WHERE b.tenant = a.tenant AND b.status = 'in_progress' AND b.ending IS NULL AND NOT b.paused
            AND b.expires_at > :now
    ),
    EXISTS (
        SELECT 1 FROM batches AS b
        WHERE b.tenant = a.tenant AND b.status = 'in_progress' AND b.ending IS NULL AND NOT b.paused
            AND b.expires_at > :now
            AND EXISTS (SELECT 1 FROM lines AS l WHERE l.batch = b.key AND l.state = 'pending')
    )
FROM (
    SELECT tenant FROM running WHERE tenant IS NOT NULL UNION SELECT tenant FROM tenants WHERE active
) AS a
LEFT JOIN tenants AS t ON t.tenant = a.tenant
ORDER BY a.tenant;

-- name: lines_in_flight
SELECT b.tenant, sum(held.lines)
FROM (
    SELECT batch, count(*) AS lines FROM lines
    WHERE state = 'claimed' AND worker IN (SELECT id FROM workers) GROUP BY batch
) AS held
JOIN batches AS b ON b.key = held.batch
GROUP BY b.tenant;

-- name: add_virtual_time
INSERT INTO virtual_time (id, time) VALUES (1, 0) ON CONFLICT (id) DO NOTHING;

-- name: lock_virtual_time
SELECT time FROM virtual_time;

-- name: set_virtual_time
UPDATE virtual_time SET time = :time;

-- name: tenant_joins
INSERT INTO tenants (tenant, served, active) VALUES (:tenant, :served, TRUE)
ON CONFLICT (tenant) DO UPDATE SET served = excluded.served, active = TRUE;

-- name: tenant_leaves
UPDATE tenants SET active = FALSE WHERE tenant = :tenant;

-- name: charge_tenant
UPDATE tenants
SET served = served + :tokens / weight,
    line_tokens = CASE
        WHEN line_tokens > 0 THEN (line_tokens * :memory + :tokens) / (:memory + :lines) ELSE :tokens / :lines
    END
WHERE tenant = :tenant;

-- name: tenant_rests
INSERT INTO tenants (tenant, rests_until) VALUES (:tenant, :until)
ON CONFLICT (tenant) DO UPDATE SET rests_until = excluded.rests_until;

-- name: set_tenant_weight
INSERT INTO tenants (tenant, weight) VALUES (:tenant, :weight)
ON CONFLICT (tenant) DO UPDATE SET weight = excluded.weight;

-- name: tenant_weights
SELECT tenant, weight FROM tenants WHERE weight <> 1 ORDER BY tenant;
