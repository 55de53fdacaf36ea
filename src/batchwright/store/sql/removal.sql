-- A batch is marked first, and from then on has no lines; its rows go later, some in each transaction.

-- name: forget_lines
UPDATE batches SET lines_removed_at = :now, removing = TRUE WHERE key = :key;

-- name: batches_of_files
SELECT key FROM batches
WHERE key IN (
    SELECT key FROM batches WHERE output_file_id IN (SELECT value FROM json_each(:ids))
    UNION
    SELECT key FROM batches WHERE error_file_id IN (SELECT value FROM json_each(:ids))
)
ORDER BY key;

-- name: forget_lines_without_files
UPDATE batches SET lines_removed_at = :now, removing = TRUE
WHERE key = :key AND lines_removed_at IS NULL
    AND NOT EXISTS (SELECT 1 FROM files AS f WHERE f.id = output_file_id)
    AND NOT EXISTS (SELECT 1 FROM files AS f WHERE f.id = error_file_id);

-- name: forget_lines_that_never_had_files
UPDATE batches SET lines_removed_at = :now, removing = TRUE
WHERE key IN (
    SELECT key FROM batches
    WHERE output_file_id IS NULL AND error_file_id IS NULL AND lines_removed_at IS NULL AND total > 0
        AND status IN ('completed', 'expired', 'cancelled')
        AND coalesce(completed_at, expired_at, cancelled_at) + coalesce(output_expires_after, :age) <= :now
    ORDER BY key LIMIT :limit
);

-- name: lines_removed_at
SELECT lines_removed_at, total FROM batches WHERE key = :key;

-- name: next_removal
SELECT key FROM batches WHERE removing ORDER BY key LIMIT 1;

-- Up to a number, not those of a list: no planner has another way than one range of the index.
-- name: remove_first_results
DELETE FROM results WHERE batch = :batch AND sequence <= (
    SELECT max(sequence) FROM (SELECT sequence FROM results WHERE batch = :batch ORDER BY sequence LIMIT :limit) AS page
);

-- name: remove_first_lines
DELETE FROM lines WHERE batch = :batch AND number <= (
    SELECT max(number) FROM (SELECT number FROM lines WHERE batch = :batch ORDER BY number LIMIT :limit) AS page
);

-- name: end_removal
UPDATE batches SET removing = FALSE WHERE key = :key;
