-- name: add_key
INSERT INTO api_keys (id, tenant, name, prefix, created_at, revoked_at, digest)
VALUES (:id, :tenant, :name, :prefix, :created_at, :revoked_at, :digest);

-- name: key
SELECT id, tenant, name, prefix, created_at, revoked_at FROM api_keys WHERE digest = :digest AND revoked_at IS NULL;

-- name: keys
SELECT id, tenant, name, prefix, created_at, revoked_at FROM api_keys
WHERE CAST(:tenant AS TEXT) IS NULL OR tenant = :tenant ORDER BY created_at DESC, id DESC;

-- name: revoke_key
UPDATE api_keys SET revoked_at = coalesce(revoked_at, :now) WHERE id = :id;
