-- name: file_columns
id, tenant, filename, purpose, bytes, created_at, expires_at, status, status_details, lines, key_id

-- name: add_file
INSERT INTO files ({file_columns})
VALUES (
    :id, :tenant, :filename, :purpose, :bytes, :created_at, :expires_at, :status, :status_details, :lines, :key_id
);

-- name: file
SELECT {file_columns} FROM files
WHERE id = :id AND tenant = :tenant AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now);

-- name: lock_file
SELECT id FROM files
WHERE id = :id AND tenant = :tenant AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now);

-- name: file_created_at
SELECT created_at FROM files WHERE id = :id AND tenant = :tenant;

-- name: files_ascending
SELECT {file_columns} FROM files
WHERE tenant = :tenant AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
    AND (CAST(:purpose AS TEXT) IS NULL OR purpose = :purpose)
    AND (created_at, id) > (:created_at, :id)
ORDER BY created_at, id LIMIT :limit;

-- name: files_descending
SELECT {file_columns} FROM files
WHERE tenant = :tenant AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
    AND (CAST(:purpose AS TEXT) IS NULL OR purpose = :purpose)
    AND (created_at, id) < (:created_at, :id)
ORDER BY created_at DESC, id DESC LIMIT :limit;

-- name: reader_of_file
SELECT id FROM batches
WHERE input_file_id = :id AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling') LIMIT 1;

-- name: delete_file
UPDATE files SET deleted_at = :now WHERE id = :id AND tenant = :tenant;

-- name: dead_files
SELECT id FROM files AS f
WHERE (deleted_at IS NOT NULL OR (expires_at IS NOT NULL AND expires_at <= :now))
    AND NOT EXISTS (
        SELECT 1 FROM batches AS b
        WHERE b.input_file_id = f.id AND b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
    )
LIMIT :limit;

-- name: forget_files
DELETE FROM files WHERE id IN (SELECT value FROM json_each(:ids));

-- name: known_files
SELECT id FROM files WHERE id IN (SELECT value FROM json_each(:ids));
