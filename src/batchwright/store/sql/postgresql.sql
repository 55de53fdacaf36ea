-- What PostgreSQL needs in another form: row locks, arrays for statements that are run for many rows at a time (each
-- parameter is then the column of its values), and the clock. Joins are written so that they can be done in one order
-- only: for a batch that has just come the planner has no statistics, and it guesses wrong by a factor of its size.

-- name: begin
UPDATE connections SET commits = commits + 1, used_at = clock_timestamp() WHERE id = :connection
RETURNING CAST(extract(epoch FROM used_at) AS DOUBLE PRECISION), commits;

-- name: add_connection
INSERT INTO connections VALUES (:connection, 0, clock_timestamp());

-- Waits for the end of a transaction that is still going on.
-- name: commits
SELECT commits FROM connections WHERE id = :connection FOR UPDATE;

-- name: forget_connections
DELETE FROM connections WHERE id IN (
    SELECT id FROM connections WHERE used_at < clock_timestamp() - INTERVAL '1 day' FOR UPDATE SKIP LOCKED
);

-- name: clock
SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION);

-- name: lock_file
SELECT id FROM files
WHERE id = :id AND tenant = :tenant AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
FOR NO KEY UPDATE;

-- name: forget_files
DELETE FROM files WHERE id IN (SELECT json_array_elements_text(CAST(:ids AS JSON)));

-- name: known_files
SELECT id FROM files WHERE id IN (SELECT json_array_elements_text(CAST(:ids AS JSON)));

-- name: lock_batch
SELECT key, status, ending, worker FROM batches WHERE id = :id FOR NO KEY UPDATE;

-- name: lock_batch_of_tenant
SELECT key, status, ending FROM batches WHERE id = :id AND tenant = :tenant FOR NO KEY UPDATE;

-- name: lock_batches
SELECT id, key, tenant, status, ending, total, completed, failed FROM batches
WHERE id IN (SELECT json_array_elements_text(CAST(:ids AS JSON))) ORDER BY key FOR NO KEY UPDATE;

-- name: held_validation
SELECT key, id FROM batches
WHERE worker = :worker AND status = 'validating' AND ending IS NULL AND expires_at > :now
FOR NO KEY UPDATE;

-- name: take_validation
UPDATE batches SET worker = :worker
WHERE key = (
    SELECT key FROM batches
    WHERE tenant = :tenant AND status = 'validating' AND ending IS NULL AND worker IS NULL AND expires_at > :now
    ORDER BY key LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
)
RETURNING key, id;

-- name: overdue_batches
SELECT key, id, status FROM batches
WHERE status IN ('in_progress', 'validating') AND ending IS NULL AND expires_at <= :now
ORDER BY key FOR NO KEY UPDATE SKIP LOCKED;

-- name: ending_among
SELECT asked.id FROM json_array_elements_text(CAST(:ids AS JSON)) AS asked (id) LEFT JOIN batches AS b ON b.id = asked.id
WHERE b.id IS NULL OR b.ending IS NOT NULL OR b.status IN ('failed', 'completed', 'expired', 'cancelled');

-- name: held_finishing
SELECT key, id FROM batches WHERE worker = :worker AND ending IS NOT NULL FOR NO KEY UPDATE;

-- name: take_finishing
UPDATE batches SET worker = :worker
WHERE key = (
    SELECT key FROM batches WHERE tenant = :tenant AND ending IS NOT NULL AND worker IS NULL
    ORDER BY key LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
)
RETURNING key, id;

-- name: add_lines
INSERT INTO lines (batch, number, custom_id, first_byte, bytes, position, state, attempt)
SELECT *, 'pending', 0 FROM unnest(
    CAST(:batch AS BIGINT[]), CAST(:number AS BIGINT[]), CAST(:custom_id AS TEXT[]), CAST(:first_byte AS BIGINT[]),
    CAST(:bytes AS BIGINT[]), CAST(:position AS BIGINT[])
);

-- name: claim_lines
WITH free AS MATERIALIZED (
    SELECT batch, number FROM lines WHERE batch = :batch AND state = 'pending'
    ORDER BY position, number LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE lines AS l SET state = 'claimed', attempt = attempt + 1, worker = :worker
FROM free WHERE l.batch = free.batch AND l.number = free.number
RETURNING l.position, l.number, l.attempt, l.custom_id, l.first_byte, l.bytes;

-- Locked by key of their batch and number, as by others.
-- name: release_lines
WITH given AS MATERIALIZED (
    SELECT (SELECT key FROM batches WHERE id = batch_id) AS batch, number, attempt, worker
    FROM unnest(
        CAST(:worker AS TEXT[]), CAST(:batch_id AS TEXT[]), CAST(:number AS BIGINT[]), CAST(:attempt AS INTEGER[])
    ) AS line (worker, batch_id, number, attempt)
    ORDER BY 1, 2
),
held AS MATERIALIZED (
    SELECT l.batch, l.number FROM given
    CROSS JOIN LATERAL (
        SELECT batch, number FROM lines
        WHERE batch = given.batch AND number = given.number AND attempt = given.attempt AND worker = given.worker
            AND state = 'claimed'
        LIMIT 1 FOR NO KEY UPDATE
    ) AS l
)
UPDATE lines AS l SET state = CASE WHEN l.crash IS NULL THEN 'pending' ELSE 'suspect' END, worker = NULL
FROM held WHERE l.batch = held.batch AND l.number = held.number;

-- name: lock_lines
SELECT l.number, l.attempt, l.state
FROM (SELECT CAST(text AS BIGINT) AS number FROM json_array_elements_text(CAST(:numbers AS JSON)) AS text ORDER BY 1) AS asked
CROSS JOIN LATERAL (
    SELECT number, attempt, state FROM lines WHERE batch = :batch AND number = asked.number LIMIT 1 FOR NO KEY UPDATE
) AS l;

-- name: finish_lines
UPDATE lines AS l SET state = given.state, sequence = given.sequence, worker = NULL, crash = NULL
FROM unnest(
    CAST(:batch AS BIGINT[]), CAST(:number AS BIGINT[]), CAST(:state AS TEXT[]), CAST(:sequence AS BIGINT[])
) AS given (batch, number, state, sequence)
WHERE l.batch = given.batch AND l.number = given.number;

-- name: add_results
INSERT INTO results (batch, sequence, number, output)
SELECT * FROM unnest(
    CAST(:batch AS BIGINT[]), CAST(:sequence AS BIGINT[]), CAST(:number AS BIGINT[]), CAST(:output AS BYTEA[])
);

-- name: free_lines_of_worker
WITH held AS MATERIALIZED (
    SELECT batch, number FROM lines WHERE worker = :worker AND state = 'claimed'
    ORDER BY batch, number FOR NO KEY UPDATE
)
UPDATE lines AS l SET state = CASE WHEN l.crash IS NULL THEN 'pending' ELSE 'suspect' END, worker = NULL
FROM held WHERE l.batch = held.batch AND l.number = held.number;

-- name: free_lines_of_batch
WITH held AS MATERIALIZED (
    SELECT batch, number FROM lines
    WHERE batch + 0 = :batch AND state = 'claimed' AND worker IN (SELECT id FROM workers)
    ORDER BY batch, number FOR NO KEY UPDATE
)
UPDATE lines AS l SET state = 'pending', worker = NULL, crash = NULL
FROM held WHERE l.batch = held.batch AND l.number = held.number;

-- name: batches_of_files
SELECT key FROM batches
WHERE key IN (
    SELECT key FROM batches WHERE output_file_id IN (SELECT json_array_elements_text(CAST(:ids AS JSON)))
    UNION
    SELECT key FROM batches WHERE error_file_id IN (SELECT json_array_elements_text(CAST(:ids AS JSON)))
)
ORDER BY key FOR NO KEY UPDATE;

-- name: forget_lines_that_never_had_files
UPDATE batches SET lines_removed_at = :now, removing = TRUE
WHERE key IN (
    SELECT key FROM batches
    WHERE output_file_id IS NULL AND error_file_id IS NULL AND lines_removed_at IS NULL AND total > 0
        AND status IN ('completed', 'expired', 'cancelled')
        AND coalesce(completed_at, expired_at, cancelled_at) + coalesce(output_expires_after, :age) <= :now
    ORDER BY key LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
);

-- name: next_removal
SELECT key FROM batches WHERE removing ORDER BY key LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;

-- A worker whose row is locked like this can renew its lease, but cannot be removed.
-- name: lease
SELECT expires_at, trying FROM workers WHERE id = :worker FOR KEY SHARE;

-- Not skipped where it is locked: its last commit is waited for.
-- name: lock_worker
SELECT id FROM workers WHERE id = :worker FOR UPDATE;

-- name: dead_workers
SELECT id FROM workers WHERE expires_at <= :now ORDER BY id FOR UPDATE SKIP LOCKED;

-- name: free_batches_of_worker
WITH held AS MATERIALIZED (SELECT key FROM batches WHERE worker = :worker ORDER BY key FOR NO KEY UPDATE)
UPDATE batches AS b SET worker = NULL FROM held WHERE b.key = held.key;

-- name: webhooks_to_notify
SELECT url, id FROM webhooks WHERE tenant = :tenant AND disabled_at IS NULL ORDER BY created_at, id FOR SHARE;

-- name: lock_webhook
SELECT id, tenant, url, secrets, created_at, disabled_at FROM webhooks WHERE id = :id AND tenant = :tenant
FOR NO KEY UPDATE;

-- name: take_deliveries
WITH due AS MATERIALIZED (
    SELECT id FROM deliveries WHERE failed_at IS NULL AND worker IS NULL AND due_at <= :now
    ORDER BY due_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE deliveries AS d SET worker = :worker, tries = tries + 1
FROM due WHERE d.id = due.id
RETURNING d.id, event_id, tenant, type, batch_id, created_at, url, webhook_id, tries - 1;

-- name: postpone
UPDATE deliveries AS d SET worker = NULL, due_at = given.until, tries = d.tries - 1
FROM unnest(
    CAST(:id AS TEXT[]), CAST(:worker AS TEXT[]), CAST(:until AS DOUBLE PRECISION[])
) AS given (id, worker, until)
WHERE d.id = given.id AND d.worker = given.worker;

-- name: forget_deliveries
DELETE FROM deliveries WHERE id IN (
    SELECT id FROM deliveries WHERE failed_at <= :before LIMIT :limit FOR UPDATE SKIP LOCKED
);

-- name: lock_virtual_time
SELECT time FROM virtual_time FOR NO KEY UPDATE;

-- name: claim_suspects
WITH free AS MATERIALIZED (
    SELECT batch, number FROM lines WHERE crash = :crash AND batch = :batch AND state = 'suspect'
    ORDER BY position, number LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE lines AS l SET state = 'claimed', attempt = attempt + 1, worker = :worker
FROM free WHERE l.batch = free.batch AND l.number = free.number
RETURNING l.position, l.number, l.attempt, l.custom_id, l.first_byte, l.bytes, l.crashes;

-- name: suspect_lines
WITH held AS MATERIALIZED (
    SELECT batch, number FROM lines AS l
    WHERE worker = :worker AND state = 'claimed'
        AND (SELECT b.tenant FROM batches AS b WHERE b.key = l.batch) = :tenant
        AND (crash IS NULL OR crash NOT IN (SELECT key FROM crashes WHERE at_once = 0))
    ORDER BY batch, number FOR NO KEY UPDATE
)
UPDATE lines AS l SET state = 'suspect', worker = NULL, crashes = crashes + 1, crash = :crash
FROM held WHERE l.batch = held.batch AND l.number = held.number;

-- name: clear_suspects
WITH held AS MATERIALIZED (
    SELECT batch, number FROM lines WHERE crash = :crash ORDER BY batch, number FOR NO KEY UPDATE
)
UPDATE lines AS l
SET crashes = crashes - 1,
    state = CASE WHEN state = 'suspect' AND crashes = 1 THEN 'pending' ELSE state END,
    crash = CASE WHEN crashes > 1 THEN crash END
FROM held WHERE l.batch = held.batch AND l.number = held.number;

-- name: clear_suspects_of_batch
WITH held AS MATERIALIZED (
    SELECT batch, number FROM lines
    WHERE batch + 0 = :batch AND crash IN (SELECT key FROM crashes) AND state = 'suspect'
    ORDER BY batch, number FOR NO KEY UPDATE
)
UPDATE lines AS l SET state = 'pending', crash = NULL
FROM held WHERE l.batch = held.batch AND l.number = held.number;

-- name: lock_key
SELECT {key_columns} FROM api_keys WHERE id = :id FOR NO KEY UPDATE;

-- name: lock_tenant
SELECT pg_advisory_xact_lock(hashtextextended('batchwright quotas of ' || CAST(:tenant AS TEXT), 0));

-- One exchange after the other, so that of two the later one sees both.
-- name: lock_exchange
SELECT pg_advisory_xact_lock(hashtextextended('batchwright exchange', 0));

-- name: add_rates
INSERT INTO rates (rate, slot, amount)
SELECT rate, slot, amount FROM unnest(
    CAST(:rate AS TEXT[]), CAST(:slot AS BIGINT[]), CAST(:amount AS BIGINT[])
) AS given (rate, slot, amount)
ON CONFLICT (rate, slot) DO UPDATE SET amount = rates.amount + excluded.amount;

-- name: rates
SELECT rate, slot, amount FROM rates
WHERE slot >= :oldest AND (slot >= :since OR rate IN (SELECT json_array_elements_text(CAST(:rates AS JSON))));

-- name: forget_rates
DELETE FROM rates WHERE (rate, slot) IN (
    SELECT rate, slot FROM rates WHERE slot < :oldest LIMIT 1000 FOR UPDATE SKIP LOCKED
);
