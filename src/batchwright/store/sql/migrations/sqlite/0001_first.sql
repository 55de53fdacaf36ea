-- Times are Unix seconds. Metadata, problems and secrets are JSON.

CREATE TABLE files (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    status TEXT NOT NULL,
    status_details TEXT,
    deleted_at REAL
) STRICT, WITHOUT ROWID;

CREATE INDEX files_listed ON files (tenant, created_at, id) WHERE deleted_at IS NULL;
CREATE INDEX files_deleted ON files (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE batches (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    metadata TEXT NOT NULL,
    model TEXT,
    output_expires_after REAL,
    idempotency_key TEXT,
    callback_url TEXT,
    simple INTEGER NOT NULL,
    parent_id TEXT,
    status TEXT NOT NULL,
    ending TEXT,
    paused INTEGER NOT NULL,
    errors TEXT NOT NULL,
    output_file_id TEXT,
    error_file_id TEXT,
    total INTEGER NOT NULL,
    completed INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL,
    in_progress_at REAL,
    finalizing_at REAL,
    completed_at REAL,
    failed_at REAL,
    expired_at REAL,
    cancelling_at REAL,
    cancelled_at REAL,
    worker TEXT -- that validates it or builds its files
) STRICT;

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
    batch INTEGER NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    first_byte INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    worker TEXT, -- that computes it
    sequence INTEGER,
    PRIMARY KEY (batch, number)
) STRICT, WITHOUT ROWID;

CREATE INDEX lines_pending ON lines (batch, number) WHERE state = 'pending';
CREATE INDEX lines_claimed ON lines (worker, batch, number) WHERE state = 'claimed';

-- Has rowids: rows with outputs of some kilobytes would make the pages of a WITHOUT ROWID table shallow.
CREATE TABLE results (
    batch INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    number INTEGER NOT NULL,
    output BLOB NOT NULL,
    PRIMARY KEY (batch, sequence)
) STRICT;

CREATE TABLE workers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    expires_at REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    url TEXT NOT NULL,
    secrets TEXT NOT NULL,
    created_at REAL NOT NULL,
    disabled_at REAL
) STRICT, WITHOUT ROWID;

CREATE INDEX webhooks_of_tenant ON webhooks (tenant, created_at, id);

-- The outbox. What arrived is deleted; what was given up has failed_at.
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY,
    event_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    type TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    created_at REAL NOT NULL,
    url TEXT NOT NULL,
    webhook_id TEXT,
    tries INTEGER NOT NULL,
    due_at REAL NOT NULL,
    worker TEXT, -- that sends it
    failed_at REAL,
    reason TEXT
) STRICT, WITHOUT ROWID;

CREATE INDEX deliveries_due ON deliveries (due_at, id) WHERE failed_at IS NULL;
CREATE INDEX deliveries_failed ON deliveries (tenant, failed_at, id) WHERE failed_at IS NOT NULL;
CREATE INDEX deliveries_of_webhook ON deliveries (webhook_id) WHERE failed_at IS NULL;
CREATE INDEX deliveries_held ON deliveries (worker) WHERE worker IS NOT NULL;

CREATE TABLE tenant_secrets (
    tenant TEXT PRIMARY KEY,
    secret TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    prefix TEXT NOT NULL,
    created_at REAL NOT NULL,
    revoked_at REAL,
    digest BLOB NOT NULL UNIQUE
) STRICT, WITHOUT ROWID;

-- One row, written to see whether the database takes writes.
CREATE TABLE checks (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    checked_at REAL NOT NULL
) STRICT;
