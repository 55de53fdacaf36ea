-- name: batch_columns
id, tenant, endpoint, input_file_id, completion_window, created_at, expires_at, metadata, model, output_expires_after,
idempotency_key, callback_url, simple, parent_id, status, ending, paused, errors, output_file_id, error_file_id,
total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens,
in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at, cancelled_at, lines_removed_at,
key_id, best_priority, enqueued_lines, enqueued_tokens, shared

-- name: add_batch
INSERT INTO batches ({batch_columns})
VALUES (
    :id, :tenant, :endpoint, :input_file_id, :completion_window, :created_at, :expires_at, :metadata, :model,
    :output_expires_after, :idempotency_key, :callback_url, :simple, :parent_id, :status, :ending, :paused, :errors,
    :output_file_id, :error_file_id, :total, :completed, :failed, :input_tokens, :cached_tokens, :output_tokens,
    :reasoning_tokens, :in_progress_at, :finalizing_at, :completed_at, :failed_at, :expired_at, :cancelling_at,
    :cancelled_at, :lines_removed_at, :key_id, :best_priority, :enqueued_lines, :enqueued_tokens, :shared
)
ON CONFLICT DO NOTHING
RETURNING key;

-- name: batch
SELECT {batch_columns} FROM batches WHERE id = :id;

-- name: batch_of_tenant
SELECT {batch_columns} FROM batches WHERE id = :id AND tenant = :tenant;

-- name: batch_of_idempotency_key
SELECT {batch_columns} FROM batches WHERE tenant = :tenant AND idempotency_key = :idempotency_key;

-- name: batch_key
SELECT key FROM batches WHERE id = :id;

-- name: batch_key_of_tenant
SELECT key FROM batches WHERE id = :id AND tenant = :tenant;

-- name: batches
SELECT {batch_columns} FROM batches
WHERE tenant = :tenant AND simple = :simple AND key < :before
    AND (CAST(:status AS TEXT) IS NULL OR status = :status)
ORDER BY key DESC LIMIT :limit;

-- name: count_batches
SELECT status, count(*) FROM batches
WHERE (CAST(:tenant AS TEXT) IS NULL OR tenant = :tenant)
    AND (CAST(:simple AS BOOLEAN) IS NULL OR simple = CAST(:simple AS BOOLEAN))
GROUP BY status;

-- Whoever changes batches locks them first, in the order of their keys.
-- name: lock_batch
SELECT key, status, ending, worker FROM batches WHERE id = :id;

-- name: lock_batch_of_tenant
SELECT key, status, ending FROM batches WHERE id = :id AND tenant = :tenant;

-- name: lock_batches
SELECT id, key, tenant, status, ending, total, completed, failed FROM batches
WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY key;

-- name: cancel_batch
UPDATE batches SET status = 'cancelling', ending = 'cancelled', cancelling_at = :now, worker = NULL WHERE key = :key;

-- name: pause_batch
UPDATE batches SET paused = :paused WHERE key = :key;

-- name: held_validation
SELECT key, id FROM batches
WHERE worker = :worker AND status = 'validating' AND ending IS NULL AND expires_at > :now;

-- name: take_validation
UPDATE batches SET worker = :worker
WHERE key = (
    SELECT key FROM batches
    WHERE tenant = :tenant AND status = 'validating' AND ending IS NULL AND worker IS NULL AND expires_at > :now
    ORDER BY key LIMIT 1
)
RETURNING key, id;

-- name: begin_batch
UPDATE batches SET status = 'in_progress', in_progress_at = :now, total = :total, model = :model,
    shared = :shared, worker = NULL
WHERE key = :key;

-- name: reject_batch
UPDATE batches SET status = 'failed', failed_at = :now, errors = :errors, worker = NULL WHERE key = :key;

-- name: count_results
UPDATE batches
SET completed = completed + :completed, failed = failed + :failed, input_tokens = input_tokens + :input_tokens,
    cached_tokens = cached_tokens + :cached_tokens, output_tokens = output_tokens + :output_tokens,
    reasoning_tokens = reasoning_tokens + :reasoning_tokens
WHERE key = :key;

-- name: finalize_batch
UPDATE batches SET status = 'finalizing', ending = 'completed', finalizing_at = :now WHERE key = :key;

-- name: overdue_batches
SELECT key, id, status FROM batches WHERE status = 'in_progress' AND ending IS NULL AND expires_at <= :now
UNION ALL
SELECT key, id, status FROM batches WHERE status = 'validating' AND ending IS NULL AND expires_at <= :now;

-- name: expire_batch
UPDATE batches SET ending = 'expired', worker = NULL WHERE key = :key;

-- name: ending_among
SELECT asked.value FROM json_each(:ids) AS asked LEFT JOIN batches AS b ON b.id = asked.value
WHERE b.id IS NULL OR b.ending IS NOT NULL OR b.status IN ('failed', 'completed', 'expired', 'cancelled');

-- name: held_finishing
SELECT key, id FROM batches WHERE worker = :worker AND ending IS NOT NULL;

-- name: take_finishing
UPDATE batches SET worker = :worker
WHERE key = (
    SELECT key FROM batches WHERE tenant = :tenant AND ending IS NOT NULL AND worker IS NULL
    ORDER BY key LIMIT 1
)
RETURNING key, id;

-- name: finish_batch
UPDATE batches
SET status = ending, ending = NULL, worker = NULL, output_file_id = :output_file_id, error_file_id = :error_file_id,
    failed = failed + :unfinished,
    completed_at = CASE ending WHEN 'completed' THEN :now END,
    expired_at = CASE ending WHEN 'expired' THEN :now END,
    cancelled_at = CASE ending WHEN 'cancelled' THEN :now END
WHERE key = :key;
