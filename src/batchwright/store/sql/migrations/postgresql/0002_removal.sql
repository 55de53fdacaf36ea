-- Lines and results of ended batches go when their files are gone. Rows of batches in `removing` are left until then.

ALTER TABLE batches ADD COLUMN lines_removed_at DOUBLE PRECISION;
ALTER TABLE batches ADD COLUMN removing BOOLEAN NOT NULL DEFAULT FALSE;

CREATE INDEX batches_of_output ON batches (output_file_id) WHERE output_file_id IS NOT NULL;
CREATE INDEX batches_of_errors ON batches (error_file_id) WHERE error_file_id IS NOT NULL;
CREATE INDEX batches_removing ON batches (key) WHERE removing;
CREATE INDEX batches_without_files ON batches (key)
WHERE output_file_id IS NULL AND error_file_id IS NULL AND lines_removed_at IS NULL AND total > 0
    AND status IN ('completed', 'expired', 'cancelled');

-- Those whose files went before there was this.
UPDATE batches SET lines_removed_at = extract(epoch FROM clock_timestamp()), removing = TRUE
WHERE status IN ('completed', 'expired', 'cancelled') AND (output_file_id IS NOT NULL OR error_file_id IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM files AS f WHERE f.id = output_file_id)
    AND NOT EXISTS (SELECT 1 FROM files AS f WHERE f.id = error_file_id);
