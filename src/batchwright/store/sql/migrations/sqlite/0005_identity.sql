-- One row, made when the store is first used with a folder of files: by it the two recognize each other.
CREATE TABLE identity (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    store_id TEXT NOT NULL,
    mark TEXT NOT NULL,
    next_mark TEXT -- that is being written to the folder
) STRICT;
