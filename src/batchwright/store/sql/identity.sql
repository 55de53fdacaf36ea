-- name: identity
SELECT store_id, mark, next_mark FROM identity;

-- name: add_identity
INSERT INTO identity (id, store_id, mark, next_mark) VALUES (1, :store_id, :mark, :next_mark) ON CONFLICT DO NOTHING;

-- name: change_identity
UPDATE identity SET store_id = :store_id, mark = :mark, next_mark = :next_mark
WHERE store_id = :old_store_id AND mark = :old_mark AND next_mark IS NOT DISTINCT FROM CAST(:old_next_mark AS TEXT);

-- name: a_live_file
SELECT id FROM files WHERE deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now) LIMIT 1;
