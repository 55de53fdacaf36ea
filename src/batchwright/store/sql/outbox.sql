-- name: add_webhook
INSERT INTO webhooks (id, tenant, url, secrets, created_at, disabled_at)
VALUES (:id, :tenant, :url, :secrets, :created_at, :disabled_at);

-- name: webhooks
SELECT id, tenant, url, secrets, created_at, disabled_at FROM webhooks WHERE tenant = :tenant ORDER BY created_at, id;

-- name: webhooks_to_notify
SELECT url, id FROM webhooks WHERE tenant = :tenant AND disabled_at IS NULL ORDER BY created_at, id;

-- name: lock_webhook
SELECT id, tenant, url, secrets, created_at, disabled_at FROM webhooks WHERE id = :id AND tenant = :tenant;

-- name: update_webhook
UPDATE webhooks SET url = :url, secrets = :secrets, disabled_at = :disabled_at WHERE id = :id;

-- name: delete_webhook
DELETE FROM webhooks WHERE id = :id AND tenant = :tenant;

-- name: redirect_deliveries
UPDATE deliveries SET url = :url WHERE webhook_id = :webhook_id AND failed_at IS NULL;

-- name: give_up_deliveries
UPDATE deliveries SET failed_at = :now, reason = :reason, worker = NULL
WHERE webhook_id = :webhook_id AND failed_at IS NULL;

-- name: add_tenant_secret
INSERT INTO tenant_secrets (tenant, secret) VALUES (:tenant, :secret) ON CONFLICT DO NOTHING;

-- name: tenant_secrets
SELECT secret, previous FROM tenant_secrets WHERE tenant = :tenant;

-- name: rotate_tenant_secret
INSERT INTO tenant_secrets (tenant, secret) VALUES (:tenant, :secret)
ON CONFLICT (tenant) DO UPDATE SET previous = tenant_secrets.secret, secret = excluded.secret;

-- name: event_of_batch
SELECT id, tenant, callback_url FROM batches WHERE key = :key;

-- name: add_delivery
INSERT INTO deliveries (id, event_id, tenant, type, batch_id, created_at, url, webhook_id, tries, due_at)
VALUES (:id, :event_id, :tenant, :type, :batch_id, :now, :url, :webhook_id, 0, :now);

-- name: take_deliveries
UPDATE deliveries SET worker = :worker, tries = tries + 1
WHERE id IN (
    SELECT id FROM deliveries WHERE failed_at IS NULL AND worker IS NULL AND due_at <= :now
    ORDER BY due_at, id LIMIT :limit
)
RETURNING id, event_id, tenant, type, batch_id, created_at, url, webhook_id, tries - 1;

-- name: delivered
DELETE FROM deliveries WHERE id = :id AND worker = :worker;

-- name: put_off
UPDATE deliveries SET worker = NULL, due_at = :until, reason = :reason WHERE id = :id AND worker = :worker;

-- A try that was not made does not count: it would make the pause after the next one longer.
-- name: postpone
UPDATE deliveries SET worker = NULL, due_at = :until, tries = tries - 1 WHERE id = :id AND worker = :worker;

-- name: give_up
UPDATE deliveries SET worker = NULL, failed_at = :now, reason = :reason WHERE id = :id AND worker = :worker;

-- name: failed_deliveries
SELECT id, event_id, tenant, type, batch_id, created_at, url, webhook_id, tries, reason FROM deliveries
WHERE tenant = :tenant AND failed_at IS NOT NULL ORDER BY failed_at DESC, id DESC LIMIT :limit;

-- name: forget_deliveries
DELETE FROM deliveries WHERE id IN (SELECT id FROM deliveries WHERE failed_at <= :before LIMIT :limit);

-- name: count_deliveries
SELECT count(*), count(failed_at) FROM deliveries;
