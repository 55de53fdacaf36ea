-- What tells others on the same machine whether the process of a worker has ended.
ALTER TABLE workers ADD COLUMN process TEXT;
