-- Times are Unix seconds. Metadata, problems and secrets are JSON.

CREATE TABLE files (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION,
    status TEXT NOT NULL,
    status_details TEXT,
    deleted_at DOUBLE PRECISION
);

CREATE INDEX files_listed ON files (tenant, created_at, id) WHERE deleted_at IS NULL;
CREATE INDEX files_deleted ON files (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE batches (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    metadata TEXT NOT NULL,
    model TEXT,
    output_expires_after DOUBLE PRECISION,
    idempotency_key TEXT,
    callback_url TEXT,
    simple BOOLEAN NOT NULL,
    parent_id TEXT,
    status TEXT NOT NULL,
    ending TEXT,
    paused BOOLEAN NOT NULL,
    errors TEXT NOT NULL,
    output_file_id TEXT,
    error_file_id TEXT,
    total BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    input_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    reasoning_tokens BIGINT NOT NULL,
    in_progress_at DOUBLE PRECISION,
    finalizing_at DOUBLE PRECISION,
    completed_at DOUBLE PRECISION,
    failed_at DOUBLE PRECISION,
    expired_at DOUBLE PRECISION,
    cancelling_at DOUBLE PRECISION,
    cancelled_at DOUBLE PRECISION,
    worker TEXT -- that validates it or builds its files
);

CREATE UNIQUE INDEX batches_idempotent ON batches (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX batches_listed ON batches (tenant, simple, key);
CREATE INDEX batches_counted ON batches (tenant, simple, status, key);
CREATE INDEX batches_of_file ON batches (input_file_id);
CREATE INDEX batches_validating ON batches (created_at, key) WHERE status = 'validating';
CREATE INDEX batches_running ON batches (expires_at, key) WHERE status = 'in_progress';
CREATE INDEX batches_ending ON batches (key) WHERE ending IS NOT NULL;
CREATE INDEX batches_held ON batches (worker) WHERE worker IS NOT NULL;

-- No foreign keys here and in `results`: rows are made only under the lock of their batch, and batches are never deleted.
CREATE TABLE lines (
    batch BIGINT NOT NULL,
    number BIGINT NOT NULL,
    custom_id TEXT NOT NULL,
    first_byte BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    worker TEXT, -- that computes it
    sequence BIGINT,
    PRIMARY KEY (batch, number)
);

CREATE INDEX lines_pending ON lines (batch, number) WHERE state = 'pending';
CREATE INDEX lines_claimed ON lines (worker, batch, number) WHERE state = 'claimed';

CREATE TABLE results (
    batch BIGINT NOT NULL,
    sequence BIGINT NOT NULL,
    number BIGINT NOT NULL,
    output BYTEA NOT NULL,
    PRIMARY KEY (batch, sequence)
);

CREATE TABLE workers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL
);

CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    url TEXT NOT NULL,
    secrets TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    disabled_at DOUBLE PRECISION
);

CREATE INDEX webhooks_of_tenant ON webhooks (tenant, created_at, id);

-- The outbox. What arrived is deleted; what was given up has failed_at.
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY,
    event_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    type TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    url TEXT NOT NULL,
    webhook_id TEXT,
    tries INTEGER NOT NULL,
    due_at DOUBLE PRECISION NOT NULL,
    worker TEXT, -- that sends it
    failed_at DOUBLE PRECISION,
    reason TEXT
);

CREATE INDEX deliveries_due ON deliveries (due_at, id) WHERE failed_at IS NULL;
CREATE INDEX deliveries_failed ON deliveries (tenant, failed_at, id) WHERE failed_at IS NOT NULL;
CREATE INDEX deliveries_of_webhook ON deliveries (webhook_id) WHERE failed_at IS NULL;
CREATE INDEX deliveries_held ON deliveries (worker) WHERE worker IS NOT NULL;

CREATE TABLE tenant_secrets (
    tenant TEXT PRIMARY KEY,
    secret TEXT NOT NULL
);

CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    prefix TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    revoked_at DOUBLE PRECISION,
    digest BYTEA NOT NULL UNIQUE
);

-- One row, written to see whether the database takes writes.
CREATE TABLE checks (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    checked_at DOUBLE PRECISION NOT NULL
);
