-- The order in which lines are claimed; see service/worker/line_positions.py. Before, it was that of the file.
ALTER TABLE lines ADD COLUMN position BIGINT NOT NULL DEFAULT 0;
DROP INDEX lines_pending;
CREATE INDEX lines_pending ON lines (batch, position, number) WHERE state = 'pending';
DROP INDEX lines_suspect;
CREATE INDEX lines_suspect ON lines (crash, batch, position, number) WHERE crash IS NOT NULL;

-- Share of the text of its prompts with which earlier lines begin too.
ALTER TABLE batches ADD COLUMN shared DOUBLE PRECISION;
