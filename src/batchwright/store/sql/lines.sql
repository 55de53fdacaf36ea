-- Statements that are run for many rows at a time have a form of their own in postgresql.sql.

-- name: add_lines
INSERT INTO lines (batch, number, custom_id, first_byte, bytes, position, state, attempt)
VALUES (:batch, :number, :custom_id, :first_byte, :bytes, :position, 'pending', 0);

-- name: remove_lines
DELETE FROM lines WHERE batch = :batch;

-- name: copy_unsuccessful_lines
INSERT INTO lines (batch, number, custom_id, first_byte, bytes, position, state, attempt)
SELECT CAST(:batch AS BIGINT), number, custom_id, first_byte, bytes, position, 'pending', 0 FROM lines
WHERE batch = :parent AND state <> 'succeeded';

-- name: count_unsuccessful_lines
SELECT count(*) FROM lines WHERE batch = :batch AND state <> 'succeeded';

-- name: claimable_batches
SELECT key, id, input_file_id, endpoint, expires_at, best_priority, tenant FROM batches AS b
WHERE tenant = :tenant AND status = 'in_progress' AND ending IS NULL AND NOT paused AND expires_at > :now
    AND (expires_at, key) > (:after_time, :after_key)
    AND EXISTS (SELECT 1 FROM lines AS l WHERE l.batch = b.key AND l.state = 'pending')
ORDER BY expires_at, key LIMIT :limit;

-- name: claim_lines
UPDATE lines SET state = 'claimed', attempt = attempt + 1, worker = :worker
WHERE batch = :batch AND number IN (
    SELECT number FROM lines WHERE batch = :batch AND state = 'pending' ORDER BY position, number LIMIT :limit
)
RETURNING position, number, attempt, custom_id, first_byte, bytes;

-- name: release_lines
UPDATE lines SET state = CASE WHEN crash IS NULL THEN 'pending' ELSE 'suspect' END, worker = NULL
WHERE batch = (SELECT key FROM batches WHERE id = :batch_id) AND number = :number AND attempt = :attempt
    AND worker = :worker AND state = 'claimed';

-- CROSS JOIN keeps the order: the planner would read all lines of the batch first.
-- name: lock_lines
SELECT l.number, l.attempt, l.state FROM json_each(:numbers) AS asked
CROSS JOIN lines AS l ON l.batch = :batch AND l.number = asked.value;

-- name: finish_lines
UPDATE lines SET state = :state, sequence = :sequence, worker = NULL, crash = NULL
WHERE batch = :batch AND number = :number;

-- name: add_results
INSERT INTO results (batch, sequence, number, output) VALUES (:batch, :sequence, :number, :output);

-- name: free_lines_of_worker
UPDATE lines SET state = CASE WHEN crash IS NULL THEN 'pending' ELSE 'suspect' END, worker = NULL
WHERE worker = :worker AND state = 'claimed';

-- All claimed lines belong to workers that exist; the sum has them found by worker, not among all of the batch.
-- name: free_lines_of_batch
UPDATE lines SET state = 'pending', worker = NULL, crash = NULL
WHERE batch + 0 = :batch AND state = 'claimed' AND worker IN (SELECT id FROM workers);

-- How long a value is stands beside it: it is not read.
-- name: result_sizes
SELECT length(output) FROM results WHERE batch = :batch AND sequence > :after ORDER BY sequence LIMIT :limit;

-- name: line_sizes
SELECT (SELECT length(r.output) FROM results AS r WHERE r.batch = l.batch AND r.sequence = l.sequence)
FROM lines AS l WHERE l.batch = :batch AND l.number > :after ORDER BY l.number LIMIT :limit;

-- Subqueries, not joins: no planner has another way to carry them out than one look into the index for each row.
-- name: results
SELECT
    r.number,
    (SELECT l.custom_id FROM lines AS l WHERE l.batch = r.batch AND l.number = r.number),
    (SELECT l.state FROM lines AS l WHERE l.batch = r.batch AND l.number = r.number),
    r.sequence,
    r.output
FROM results AS r WHERE r.batch = :batch AND r.sequence > :after ORDER BY r.sequence LIMIT :limit;

-- name: lines
SELECT
    l.number,
    l.custom_id,
    l.state,
    l.sequence,
    (SELECT r.output FROM results AS r WHERE r.batch = l.batch AND r.sequence = l.sequence),
    l.first_byte,
    l.bytes
FROM lines AS l WHERE l.batch = :batch AND l.number > :after ORDER BY l.number LIMIT :limit;

-- name: line_sizes_in_state
SELECT (SELECT length(r.output) FROM results AS r WHERE r.batch = l.batch AND r.sequence = l.sequence)
FROM lines AS l WHERE l.batch = :batch AND l.number > :after AND l.state = :state ORDER BY l.number LIMIT :limit;

-- name: lines_in_state
SELECT
    l.number,
    l.custom_id,
    l.state,
    l.sequence,
    (SELECT r.output FROM results AS r WHERE r.batch = l.batch AND r.sequence = l.sequence),
    l.first_byte,
    l.bytes
FROM lines AS l WHERE l.batch = :batch AND l.number > :after AND l.state = :state ORDER BY l.number LIMIT :limit;

-- name: count_unfinished_lines
SELECT coalesce(sum(total - completed - failed), 0) FROM batches WHERE status = 'in_progress' AND ending IS NULL;

-- name: count_claimed_lines
SELECT count(*) FROM lines AS l JOIN batches AS b ON b.key = l.batch
WHERE l.state = 'claimed' AND l.worker IN (SELECT id FROM workers) AND b.status = 'in_progress' AND b.ending IS NULL;
