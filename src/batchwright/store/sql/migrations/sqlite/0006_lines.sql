-- Fair shares of tenants. `served` is virtual time, `line_tokens` the mean of a line; see limiting/shares.py.
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY,
    weight REAL NOT NULL DEFAULT 1,
    served REAL NOT NULL DEFAULT 0,
    line_tokens REAL NOT NULL DEFAULT 0,
    active INTEGER NOT NULL DEFAULT FALSE,
    rests_until REAL NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE INDEX tenants_active ON tenants (tenant) WHERE active;

-- One row: the virtual time at which a tenant starts that had nothing to compute.
CREATE TABLE virtual_time (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    time REAL NOT NULL
) STRICT;

CREATE INDEX batches_running_of_tenant ON batches (tenant, expires_at, key) WHERE status = 'in_progress';

-- Deaths of workers with lines in work, for each tenant that had some; see policies/suspects.py.
CREATE TABLE crashes (
    key INTEGER PRIMARY KEY AUTOINCREMENT, -- never given out twice
    worker TEXT NOT NULL,
    tenant TEXT NOT NULL,
    crashed_at REAL NOT NULL,
    at_once INTEGER NOT NULL,
    taker TEXT -- the worker that sees to its suspects
) STRICT;

-- How often a process died with the line in work; and the last such death, while the line is under suspicion.
ALTER TABLE lines ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE lines ADD COLUMN crash INTEGER;
CREATE INDEX lines_suspect ON lines (crash, batch, number) WHERE crash IS NOT NULL;

-- The crash whose suspects the worker computes; NULL: it computes none.
ALTER TABLE workers ADD COLUMN trying INTEGER;
