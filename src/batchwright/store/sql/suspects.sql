-- Lines that were in progress when a process died; the rule is in policies/suspects.py.

-- name: any_crash
SELECT 1 FROM crashes LIMIT 1;

-- name: suspects
SELECT c.key, c.tenant, c.crashed_at, c.at_once, c.taker, coalesce(t.rests_until, 0)
FROM crashes AS c LEFT JOIN tenants AS t ON t.tenant = c.tenant
WHERE EXISTS (
    SELECT 1 FROM lines AS l JOIN batches AS b ON b.key = l.batch
    WHERE l.crash = c.key AND l.state = 'suspect' AND b.status = 'in_progress' AND b.ending IS NULL AND NOT b.paused
        AND b.expires_at > :now
)
ORDER BY c.crashed_at, c.key;

-- name: suspect_batches
SELECT key, id, input_file_id, endpoint, expires_at, best_priority, tenant FROM batches AS b
WHERE tenant = :tenant AND status = 'in_progress' AND ending IS NULL AND NOT paused AND expires_at > :now
    AND EXISTS (SELECT 1 FROM lines AS l WHERE l.crash = :crash AND l.batch = b.key AND l.state = 'suspect')
ORDER BY expires_at, key;

-- name: claim_suspects
UPDATE lines SET state = 'claimed', attempt = attempt + 1, worker = :worker
WHERE batch = :batch AND number IN (
    SELECT number FROM lines WHERE crash = :crash AND batch = :batch AND state = 'suspect'
    ORDER BY position, number LIMIT :limit
)
RETURNING position, number, attempt, custom_id, first_byte, bytes, crashes;

-- Those that are to fail are not computed, and so not in progress.
-- name: lines_in_progress
SELECT count(*) FROM (
    SELECT 1 FROM lines
    WHERE worker = :worker AND state = 'claimed'
        AND (crash IS NULL OR crash NOT IN (SELECT key FROM crashes WHERE at_once = 0))
    LIMIT :limit
) AS held;

-- name: lines_in_progress_by_tenant
SELECT b.tenant, count(*), max(l.crashes)
FROM lines AS l JOIN batches AS b ON b.key = l.batch
WHERE l.worker = :worker AND l.state = 'claimed'
    AND (l.crash IS NULL OR l.crash NOT IN (SELECT key FROM crashes WHERE at_once = 0))
GROUP BY b.tenant ORDER BY b.tenant;

-- name: add_crash
INSERT INTO crashes (worker, tenant, crashed_at, at_once) VALUES (:worker, :tenant, :now, :at_once) RETURNING key;

-- name: suspect_lines
UPDATE lines SET state = 'suspect', worker = NULL, crashes = crashes + 1, crash = :crash
WHERE worker = :worker AND state = 'claimed' AND (SELECT b.tenant FROM batches AS b WHERE b.key = batch) = :tenant
    AND (crash IS NULL OR crash NOT IN (SELECT key FROM crashes WHERE at_once = 0));

-- name: try_suspects
UPDATE workers SET trying = :crash WHERE id = :worker;

-- name: take_suspects
UPDATE crashes SET taker = :worker WHERE key = :crash AND taker IS NULL;

-- name: leave_suspects
UPDATE crashes SET taker = NULL WHERE taker = :worker;

-- name: tried_at_once
SELECT c.at_once FROM workers AS w JOIN crashes AS c ON c.key = w.trying WHERE w.id = :worker;

-- name: crashes_of_worker
SELECT key FROM crashes WHERE worker = :worker ORDER BY key;

-- name: clear_suspects
UPDATE lines
SET crashes = crashes - 1,
    state = CASE WHEN state = 'suspect' AND crashes = 1 THEN 'pending' ELSE state END,
    crash = CASE WHEN crashes > 1 THEN crash END
WHERE crash = :crash;

-- What was to fail has a try left after all.
-- name: try_again
UPDATE crashes SET at_once = 1 WHERE key = :crash AND at_once = 0;

-- name: clear_suspects_of_batch
UPDATE lines SET state = 'pending', crash = NULL
WHERE batch + 0 = :batch AND crash IN (SELECT key FROM crashes) AND state = 'suspect';

-- name: forget_crashes
DELETE FROM crashes WHERE NOT EXISTS (SELECT 1 FROM lines AS l WHERE l.crash = crashes.key);

-- name: count_suspects
SELECT count(*) FROM lines AS l JOIN batches AS b ON b.key = l.batch
WHERE l.crash IN (SELECT key FROM crashes) AND l.state = 'suspect' AND b.status = 'in_progress' AND b.ending IS NULL;
