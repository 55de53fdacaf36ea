-- name: add_worker
INSERT INTO workers (id, name, expires_at, process) VALUES (:id, :name, :expires_at, :process);

-- name: processes
SELECT id, process FROM workers WHERE process IS NOT NULL;

-- name: lease
SELECT expires_at, trying FROM workers WHERE id = :worker;

-- name: renew_lease
UPDATE workers SET expires_at = :expires_at WHERE id = :worker AND expires_at > :now;

-- name: lock_worker
SELECT id FROM workers WHERE id = :worker;

-- name: publish
UPDATE workers SET snapshot = :snapshot WHERE id = :worker AND expires_at > :now;

-- name: snapshots
SELECT id, name, snapshot FROM workers WHERE expires_at > :now ORDER BY name, id;

-- name: remove_worker
DELETE FROM workers WHERE id = :worker;

-- name: dead_workers
SELECT id FROM workers WHERE expires_at <= :now;

-- name: free_batches_of_worker
UPDATE batches SET worker = NULL WHERE worker = :worker;

-- A try whose end nobody saw does not count: it would make the pause after the next one longer.
-- name: free_deliveries_of_worker
UPDATE deliveries SET worker = NULL, tries = tries - 1 WHERE worker = :worker;

-- name: check
INSERT INTO checks (id, checked_at) VALUES (1, :now) ON CONFLICT (id) DO UPDATE SET checked_at = excluded.checked_at;
