-- name: key_columns
id, tenant, name, prefix, created_at, revoked_at, expires_at, scopes, weight, best_priority, last_used_at,
previous_until, quotas

-- name: add_key
INSERT INTO api_keys ({key_columns}, digest)
VALUES (
    :id, :tenant, :name, :prefix, :created_at, :revoked_at, :expires_at, :scopes, :weight, :best_priority,
    :last_used_at, :previous_until, :quotas, :digest
);

-- The last column says until when this secret works, where another one has replaced it.
-- name: key
SELECT {key_columns}, CAST(NULL AS DOUBLE PRECISION) FROM api_keys
WHERE digest = :digest AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
UNION ALL
SELECT {key_columns}, previous_until FROM api_keys
WHERE previous_digest = :digest AND previous_until > :now AND revoked_at IS NULL
    AND (expires_at IS NULL OR expires_at > :now);

-- name: any_key
SELECT 1 FROM api_keys LIMIT 1;

-- name: keys
SELECT {key_columns} FROM api_keys
WHERE CAST(:tenant AS TEXT) IS NULL OR tenant = :tenant ORDER BY created_at DESC, id DESC;

-- name: lock_key
SELECT {key_columns} FROM api_keys WHERE id = :id;

-- name: update_key
UPDATE api_keys
SET name = :name, expires_at = :expires_at, scopes = :scopes, weight = :weight, best_priority = :best_priority,
    quotas = :quotas
WHERE id = :id;

-- name: rotate_key
UPDATE api_keys SET previous_digest = digest, previous_until = :until, digest = :digest, prefix = :prefix
WHERE id = :id;

-- name: note_key_use
UPDATE api_keys SET last_used_at = :used_at WHERE id = :id AND coalesce(last_used_at, 0) < :used_at;

-- name: revoke_key
UPDATE api_keys SET revoked_at = coalesce(revoked_at, :now) WHERE id = :id;
