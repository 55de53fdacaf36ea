-- Fair shares of tenants. `served` is virtual time, `line_tokens` the mean of a line; see limiting/shares.py.
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY,
    weight DOUBLE PRECISION NOT NULL DEFAULT 1,
    served DOUBLE PRECISION NOT NULL DEFAULT 0,
    line_tokens DOUBLE PRECISION NOT NULL DEFAULT 0,
    active BOOLEAN NOT NULL DEFAULT FALSE,
    rests_until DOUBLE PRECISION NOT NULL DEFAULT 0
);

CREATE INDEX tenants_active ON tenants (tenant) WHERE active;

-- One row: the virtual time at which a tenant starts that had nothing to compute.
CREATE TABLE virtual_time (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    time DOUBLE PRECISION NOT NULL
);

CREATE INDEX batches_running_of_tenant ON batches (tenant, expires_at, key) WHERE status = 'in_progress';

-- Deaths of workers with lines in work, for each tenant that had some; see policies/suspects.py.
CREATE TABLE crashes (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker TEXT NOT NULL,
    tenant TEXT NOT NULL,
    crashed_at DOUBLE PRECISION NOT NULL,
    at_once BIGINT NOT NULL,
    taker TEXT -- the worker that sees to its suspects
);

-- How often a process died with the line in work; and the last such death, while the line is under suspicion.
ALTER TABLE lines ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE lines ADD COLUMN crash BIGINT;
CREATE INDEX lines_suspect ON lines (crash, batch, number) WHERE crash IS NOT NULL;

-- The crash whose suspects the worker computes; NULL: it computes none.
ALTER TABLE workers ADD COLUMN trying BIGINT;
